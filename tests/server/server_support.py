"""A real server on a free port of this machine, over a tiny random model whose steps a test can hold back."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn
from byte_support import byte_tokenizer, tiny_llm, tiny_model

from polytempo.async_llm import AsyncLLM
from polytempo.llm import LLM
from polytempo.server.app import ServerSettings, make_app

__all__ = ["Gate", "RunningServer", "byte_tokenizer", "open_request", "running", "tiny_llm", "tiny_model", "wait_until"]
PATIENCE = 30.0
"""Seconds after which a test fails that waits for something: far more than it takes, for busy machines."""


class Gate:
    """Holds an engine's steps back: `open` lets them run, `shut` stops before the next, `let` runs a few."""

    def __init__(self, llm: LLM) -> None:
        self.num_steps = 0
        self._step, self._is_open, self._tickets = llm.engine.step, threading.Event(), threading.Semaphore(0)
        self._is_open.set()
        llm.engine.step = self._gated

    def _gated(self):
        while not self._is_open.is_set():
            if self._tickets.acquire(timeout=0.005):
                break
            return []  # an empty step: commands, such as an abort, are taken between steps
        finished = self._step()
        self.num_steps += 1
        return finished

    def shut(self) -> None:
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()

    def let(self, num_steps: int) -> None:
        wanted = self.num_steps + num_steps
        self._tickets.release(num_steps)
        wait_until(lambda: self.num_steps == wanted, "the engine took its steps")


class RunningServer:
    """The server in a thread of its own, on 127.0.0.1."""

    def __init__(self, llm: LLM, step_timeout: float = 60.0, **settings) -> None:
        self.llm = llm
        self.front = AsyncLLM(llm, step_timeout)
        self.settings = ServerSettings(**{"model_name": "tiny", "drain_timeout": 5.0, **settings})
        self.app = make_app(self.front, self.settings)
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(self.app, log_config=None, lifespan="on", timeout_graceful_shutdown=5)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([self.socket])), daemon=True)

    def __enter__(self) -> RunningServer:
        self.thread.start()
        wait_until(lambda: self.server.started, "the server started")
        return self

    def __exit__(self, *exc_info) -> None:
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the server did not end"

    def request(self, method: str, path: str, body=None, headers=None) -> tuple[int, dict, str]:
        """Status, headers and text of one request; a dict becomes JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        sent = {} if body is None else {"Content-Type": "application/json"}
        data = body if body is None or isinstance(body, (str, bytes)) else json.dumps(body)
        with contextlib.closing(connection):
            connection.request(method, path, data, {**sent, **(headers or {})})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read().decode()

    def post(self, path: str, body, headers=None) -> tuple[int, dict]:
        """Status and JSON of one POST."""
        status, _, text = self.request("POST", path, body, headers)
        return status, json.loads(text)

    def get(self, path: str) -> tuple[int, str]:
        """Status and text."""
        status, _, text = self.request("GET", path)
        return status, text

    def events(self, path: str, body: dict) -> list[dict | str]:
        """Every event of a stream, as JSON or "[DONE]"."""
        status, headers, text = self.request("POST", path, body | {"stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics."""
        samples = (line.rsplit(" ", 1) for line in self.get("/metrics")[1].splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def wait_idle(self) -> None:
        """Until every seat is free and nothing waits."""
        scheduler = self.llm.engine.scheduler
        wait_until(
            lambda: not scheduler.has_work and scheduler.num_free_slots == self.llm.engine.config.max_rows
            and self.front.num_unfinished_rows == 0,
            "every seat is free",
        )  # fmt: skip
        scheduler.check()


def open_request(server: RunningServer, path: str, body: dict) -> socket.socket:
    """Send a request over a bare socket and leave it open; closing it is the client that vanishes."""
    data = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


def wait_until(condition, what: str, patience: float = PATIENCE) -> float:
    """Poll until true; returns the seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < patience, f"not within {patience} s: {what}"
        time.sleep(0.002)
    return time.monotonic() - started


@contextlib.contextmanager
def running(llm: LLM, **options) -> Iterator[RunningServer]:
    """A server for one test."""
    with RunningServer(llm, **options) as server:
        yield server
