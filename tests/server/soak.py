"""Ten minutes of clients that come, vanish and send nonsense; every answer that arrives is compared.

`make soak`, or `make soak SECONDS=60`. Exit code 1 unless nothing differed, every seat is free at the end and memory
has not grown.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from byte_support import TEMPLATE, byte_tokenizer, tiny_llm, tiny_model  # noqa: E402
from test_same_answers import cases, expected  # noqa: E402

from polytempo.checkpoint.export import export_model  # noqa: E402

SEATS, CLIENTS, CASES = 16, 24, 80
MOST_GROWTH = 1.02
INVALID = ({"prompt": []}, {"prompt": "x", "suffix": "y"}, {"prompt": "x", "temperature": -1}, {"prompt": "x" * 999},
           {"prompt": "x", "n": 0}, {"prompt": "x", "regex": "("}, {"max_tokens": 1})  # fmt: skip


@dataclass
class Tally:
    """What happened, by quarter of the run."""

    compared: Counter = field(default_factory=Counter)
    mismatched: Counter = field(default_factory=Counter)
    outcomes: Counter = field(default_factory=Counter)


def write_checkpoint(folder: Path) -> None:
    """The tiny model and its tokenizer, as `polytempo serve` reads them."""
    export_model(tiny_model(), folder, to="huggingface")
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_json())
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def start_server(folder: Path, port: int) -> subprocess.Popen:
    """The server as a process, its log beside the checkpoint."""
    command = [sys.executable, "-c", "from polytempo.cli import main; main()", "serve", "--model", str(folder),
               "--port", str(port), "--max-rows", str(SEATS), "--max-model-len", "256", "--model-name", "tiny",
               "--draft-len", "2"]  # fmt: skip
    return subprocess.Popen(command, stderr=(folder / "log").open("w"))


def get(port: int, path: str) -> dict:
    """JSON of a GET."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
        return json.load(response)


def rows_left(status: dict) -> list[int]:
    """Rows in seats, waiting, and on the server's books."""
    return [len(status["rows"]), status["num_waiting"], status["num_unfinished_rows"]]


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM (Linux)."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


async def open_stream(port: int, body: dict):
    """Send a request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    return reader, writer


async def leave_early(port: int, body: dict, rng: random.Random) -> str:
    """Read a little, or nothing, and hang up."""
    reader, writer = await open_stream(port, body | {"stream": rng.random() < 0.7, "max_tokens": 80})
    await asyncio.sleep(rng.random() * 0.5)
    if rng.random() < 0.5:
        await reader.read(rng.randrange(1, 2000))
    writer.close()
    return "left"


async def ask(port: int, body: dict) -> tuple[int, list]:
    """Status, and (text, finish reason, log-probabilities) of each choice."""
    reader, writer = await open_stream(port, body)
    head, _, text = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    status = int(head.split()[1])
    if status != 200:
        return status, []
    if body.get("stream"):
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]", text[-300:]
        answers = [json.loads(event) for event in events[:-1]]
    else:
        answers = [json.loads(text[text.index("{") : text.rindex("}") + 1])]
    parts = [("", None, []) for _ in range(body.get("n", 1))]
    for choice in (choice for answer in answers for choice in answer["choices"]):
        so_far, reason, logprobs = parts[choice["index"]]
        parts[choice["index"]] = (so_far + choice["text"], reason or choice["finish_reason"],
                                  logprobs + choice["logprobs"]["token_logprobs"])  # fmt: skip
    return status, parts


async def client(port: int, bodies: list, right: list, rng: random.Random, until: float, tally: Tally) -> None:
    """One client until the time is up."""
    started = time.monotonic()
    while (now := time.monotonic()) < until:
        quarter = min(3, int(4 * (now - started) / (until - started)))
        dice, number = rng.random(), rng.randrange(len(bodies))
        if dice < 0.2:
            tally.outcomes[await leave_early(port, bodies[number], rng)] += 1
        elif dice < 0.3:
            status, _ = await ask(port, rng.choice(INVALID))
            tally.outcomes["refused" if 400 <= status < 500 else f"invalid got {status}"] += 1
        else:
            status, parts = await ask(port, bodies[number] | {"stream": rng.random() < 0.5})
            tally.outcomes[f"answered {status}"] += 1
            tally.compared[quarter] += 1
            tally.mismatched[quarter] += status != 200 or parts != right[number]
        if rng.random() < 0.05:
            await asyncio.sleep(rng.random())  # gone for a while


async def soak(port: int, pid: int, seconds: float) -> tuple[Tally, float]:
    """Run all clients; returns what happened and how much memory grew after the first fifth."""
    alone = tiny_llm(max_rows=1, speculate="none", queue_limit=None)
    bodies = [body for body, _ in cases(CASES, seed=7)]
    right = [expected(alone, body) for body in bodies]
    print(f"{len(bodies)} answers computed offline; {CLIENTS} clients for {seconds:g} s", flush=True)
    tally, started = Tally(), time.monotonic()
    workers = [asyncio.create_task(client(port, bodies, right, random.Random(seed), started + seconds, tally))
               for seed in range(CLIENTS)]  # fmt: skip
    await asyncio.sleep(min(120.0, seconds / 5))
    before = resident_bytes(pid)
    await asyncio.gather(*workers)
    return tally, resident_bytes(pid) / before


def main() -> int:
    """Serve, soak, judge."""
    seconds = float(os.environ.get("SECONDS_TO_RUN", "600"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tiny"
        write_checkpoint(folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = start_server(folder, port)
        try:
            while "Uvicorn running" not in (folder / "log").read_text():
                assert server.poll() is None, (folder / "log").read_text()
                time.sleep(0.1)
            tally, growth = asyncio.run(soak(port, server.pid, seconds))
            give_up = time.monotonic() + 30
            while any(left := rows_left(status := get(port, "/status"))) and time.monotonic() < give_up:
                time.sleep(0.2)
            health = get(port, "/health")["status"]
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)
    faults = [outcome for outcome in tally.outcomes if outcome not in ("left", "refused", "answered 200")]
    is_right = not any(tally.mismatched.values()) and not faults and left == [0, 0, 0] and code == 0
    result = {
        "seconds": seconds, "outcomes": dict(tally.outcomes),
        "compared_by_quarter": [tally.compared[q] for q in range(4)],
        "mismatched_by_quarter": [tally.mismatched[q] for q in range(4)], "rows_left": left, "health": health,
        "exit_code": code, "memory_growth": round(growth, 4), "steps": status["num_steps"],
    }  # fmt: skip
    print(json.dumps(result))
    return 0 if is_right and health == "ok" and growth <= MOST_GROWTH and min(tally.compared.values()) > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
