"""A server that tests share as long as they leave it idle."""

import pytest
from server_support import Gate, RunningServer, tiny_llm


@pytest.fixture(scope="session")
def shared_server():
    llm = tiny_llm()
    gate = Gate(llm)
    with RunningServer(llm) as server:
        server.gate = gate
        yield server


@pytest.fixture
def server(shared_server):
    shared_server.wait_idle()
    yield shared_server
    shared_server.gate.open()
    shared_server.wait_idle()
