"""A server that tests share as long as they leave it idle."""

import pytest
from process_support import Process
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


@pytest.fixture
def launched(tmp_path):
    made = []

    def launch(*options):
        made.append(Process(tmp_path, *options))
        return made[-1]

    yield launch
    for one in made:
        one.process.kill()
        one.process.wait()
