"""`polytempo serve` as a process of its own, with the demo model."""

import json
import socket
import subprocess
import sys

from server_support import PATIENCE, wait_until

LAUNCH = [sys.executable, "-c", "from polytempo.cli import main; main()", "serve"]


class Process:
    """A server process on a free port, and bare sockets to it."""

    def __init__(self, folder, *options):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = folder / "log"
        command = [*LAUNCH, "--port", str(self.port), "--max-rows", "2", "--max-model-len", "512", *options]
        self.process = subprocess.Popen(command, stderr=self.log.open("w"), stdout=subprocess.DEVNULL)
        wait_until(lambda: "Uvicorn running" in self.log.read_text() or self.process.poll() is not None,
                   "it serves", 4 * PATIENCE)  # fmt: skip
        assert self.process.poll() is None, self.log.read_text()

    def open(self, body):
        data = json.dumps(body).encode()
        client = socket.create_connection(("127.0.0.1", self.port), timeout=4 * PATIENCE)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
        client.sendall(f"{head}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return client
