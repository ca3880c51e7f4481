"""Load on a running OpenAI-compatible server: latencies as its clients see them. Knows nothing of the engine."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polytempo.errors import ConfigError

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Load:
    """What to send.

    Attributes:
        url: of the server, for example http://127.0.0.1:8000.
        num_requests: in all.
        num_clients: at once.
        prompt_lens: approximate tokens of prompts, in turn.
        max_tokens: output tokens of each request; EOS is ignored.
        seed: which prompts.
        api_key: bearer token, None for none.
        model: None leaves it to the server.
    """

    url: str
    num_requests: int = 64
    num_clients: int = 8
    prompt_lens: Sequence[int] = (32, 200, 64, 400)
    max_tokens: int = 64
    seed: int = 0
    api_key: str | None = None
    model: str | None = None

    def body(self, number: int) -> dict[str, object]:
        """One request: a piece of this package's source, about 3 characters per token."""
        source = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py")))
        size = 3 * self.prompt_lens[number % len(self.prompt_lens)]
        start = random.Random(f"{self.seed} {number}").randrange(max(1, len(source) - size))
        body = {"prompt": source[start : start + size], "max_tokens": self.max_tokens, "temperature": 0.8,
                "seed": number, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        return body if self.model is None else body | {"model": self.model}


@dataclass(frozen=True)
class Timing:
    """One answered request: seconds, and tokens as the server counts them."""

    ttft: float
    tpot: float | None
    longest_gap: float
    num_prompt_tokens: int
    num_output_tokens: int


async def _ask(load: Load, number: int) -> Timing:
    """Send one request over a connection of its own and time its events."""
    address = urllib.parse.urlsplit(load.url)
    if address.scheme != "http" or not address.hostname:
        raise ConfigError(f"{load.url!r} is not the address of a server; it must be http://HOST:PORT")
    reader, writer = await asyncio.open_connection(address.hostname, address.port or 80)
    data = json.dumps(load.body(number)).encode()
    head = (f"POST {address.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
            "Connection: close\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n")  # fmt: skip
    if load.api_key is not None:
        head += f"Authorization: Bearer {load.api_key}\r\n"
    started = time.perf_counter()
    writer.write(f"{head}\r\n".encode() + data)
    moments, usage = [], None
    try:
        status = (await reader.readline()).split()
        if status[1:2] != [b"200"]:
            said = (await reader.read()).decode()[-300:]
            raise ConfigError(f"{load.url} answered {b' '.join(status).decode()}: {said}")
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ConfigError(f"{load.url} failed: {event['error']['message']}")
            usage = event.get("usage") or usage
            if event["choices"]:
                moments.append(time.perf_counter())
    finally:
        writer.close()
    if usage is None or not moments:
        raise ConfigError(f"{load.url} sent no usage; it does not know stream_options")
    num_output = usage["completion_tokens"]
    tpot = (moments[-1] - moments[0]) / (num_output - 1) if num_output > 1 else None
    gap = max((later - sooner for sooner, later in zip(moments, moments[1:], strict=False)), default=0.0)
    return Timing(moments[0] - started, tpot, gap, usage["prompt_tokens"], num_output)


async def _run(load: Load) -> tuple[list[Timing], float]:
    numbers, timings = iter(range(load.num_requests)), []

    async def client() -> None:
        for number in numbers:
            timings.append(await _ask(load, number))

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.num_clients)))
    return timings, time.perf_counter() - started


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]


def run_load(load: Load) -> dict[str, object]:
    """Send everything; returns latencies in seconds and throughput in tokens per second.

    Args:
        load: what to send.

    Returns:
        A JSON object: percentiles, and every request's own numbers under "requests".

    Raises:
        ConfigError: the server cannot be reached, refuses a request or fails one.
    """
    try:
        timings, seconds = asyncio.run(_run(load))
    except OSError as error:
        raise ConfigError(f"{load.url} cannot be reached: {error}") from None
    columns = {"ttft": [t.ttft for t in timings], "tpot": [t.tpot for t in timings if t.tpot is not None],
               "longest_gap": [t.longest_gap for t in timings]}  # fmt: skip
    result: dict[str, object] = {
        "num_requests": len(timings), "num_clients": load.num_clients, "seconds": seconds,
        "prompt_tokens": sum(t.num_prompt_tokens for t in timings),
        "output_tokens": sum(t.num_output_tokens for t in timings),
        "output_tokens_per_second": sum(t.num_output_tokens for t in timings) / seconds,
    }  # fmt: skip
    for name, values in columns.items():
        result[name] = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES} if values else None
    return result | {"requests": [vars(timing) for timing in timings]}


def load_table(result: dict[str, object]) -> str:
    """The percentiles, in milliseconds, and the throughput."""
    lines = [f"{'':<12}" + "".join(f"{f'p{percent}':>10}" for percent in PERCENTILES)]
    for name in ("ttft", "tpot", "longest_gap"):
        values = result[name] or {}
        lines.append(f"{name:<12}" + "".join(f"{1e3 * value:>7.1f} ms" for value in values.values()))
    lines.append(f"{result['output_tokens']} output tokens, {result['output_tokens_per_second']:.1f} per second")
    return "\n".join(lines)


def plot_load(result: dict[str, object], path: Path) -> None:
    """Distribution of time to first token and of time per later token.

    Args:
        result: of `run_load`.
        path: PNG to write.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("the plot needs matplotlib; pip install 'polytempo[plots]'") from None
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    requests = result["requests"]
    for axes, name, label in zip(figure.subplots(1, 2, sharey=True), ("ttft", "tpot"),
                                 ("time to first token (ms)", "time per later token (ms)"), strict=True):  # fmt: skip
        values = sorted(1e3 * request[name] for request in requests if request[name] is not None)
        axes.step(values, [(place + 1) / len(values) for place in range(len(values))], where="post", color="#1f7a5c")
        axes.set(xlabel=label, xlim=(0, None), ylim=(0, 1))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("share of requests")
    figure.suptitle(f"{result['num_requests']} requests, {result['num_clients']} clients")
    figure.savefig(path, dpi=120)
