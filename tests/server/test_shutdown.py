"""`polytempo serve` as a process: what it prints, how the first signal drains and the second does not."""

import re
import signal
import socket
import time

from server_support import PATIENCE, wait_until

# Slow on purpose: in C++ the demo model is done before a signal arrives.
SLOW = ("--kernels", "torch")
STREAM = {"prompt": "import os\n", "temperature": 0, "ignore_eos": True, "stream": True}


def read_all(client):
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts).decode()


def test_first_signal_drains(launched):
    """Field case 49: two streams finish with DONE, nothing new is taken, exit code 0."""
    server = launched("--model-name", "mine", "--drain-timeout", "100", *SLOW)
    printed = server.log.read_text()
    assert re.search(r"model +mine: 5 layers, bfloat16 on cpu, \d+ MiB", printed)
    assert re.search(r"rows +2 of 512 tokens, \d+ MiB of state, at most \d+; 256 more may wait", printed)
    assert "curl http://127.0.0.1" in printed and "drafts   auto per step" in printed
    clients = [server.open(STREAM | {"max_tokens": 40}) for _ in range(2)]
    first = [client.recv(1) for client in clients]
    server.process.send_signal(signal.SIGTERM)

    def is_refused():
        try:
            socket.create_connection(("127.0.0.1", server.port), timeout=5).close()
        except OSError:
            return True
        return False

    wait_until(is_refused, "new connections are refused")
    for begun, client in zip(first, clients, strict=True):
        text = begun.decode() + read_all(client)
        assert text.startswith("HTTP/1.1 200") and "data: [DONE]" in text and '"finish_reason": "length"' in text
    assert server.process.wait(4 * PATIENCE) == 0
    assert "SIGTERM: finishing what runs" in server.log.read_text()


def test_second_signal_ends_at_once(launched):
    server = launched("--drain-timeout", "600", "--speculate", "none", *SLOW)
    client = server.open(STREAM | {"max_tokens": 500})
    client.recv(1)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "finishing what runs" in server.log.read_text(), "it drains")
    assert server.process.poll() is None
    time.sleep(0.1)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert "[DONE]" not in read_all(client)
