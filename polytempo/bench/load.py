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
        num_clients: at once; each sends its next request when the last was answered.
        prompt_lens: approximate tokens of prompts, in turn.
        max_tokens: output tokens of each request; EOS is ignored.
        seed: which prompts.
        api_key: bearer token, None for none.
        model: None leaves it to the server.
        rate: requests per second, in place of clients: they come at random, whether or not the server keeps up, with
            exponential times between them.
    """

    url: str
    num_requests: int = 64
    num_clients: int = 8
    prompt_lens: Sequence[int] = (32, 200, 64, 400)
    max_tokens: int = 64
    seed: int = 0
    api_key: str | None = None
    model: str | None = None
    rate: float | None = None

    def arrivals(self) -> list[float]:
        """When requests come at `rate`, in seconds; the same for the same seed."""
        draw, moments = random.Random(f"{self.seed} arrivals"), [0.0]
        while len(moments) < self.num_requests:
            moments.append(moments[-1] + draw.expovariate(self.rate))
        return moments

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
    """One answered request: seconds, and tokens as the server counts them; gaps are between its stream's events."""

    ttft: float
    tpot: float | None
    gaps: tuple[float, ...]
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
    gaps = tuple(later - sooner for sooner, later in zip(moments, moments[1:], strict=False))
    return Timing(moments[0] - started, tpot, gaps, max(gaps, default=0.0), usage["prompt_tokens"], num_output)


async def _run(load: Load) -> tuple[list[Timing], float]:
    numbers, timings = iter(range(load.num_requests)), []

    async def client() -> None:
        for number in numbers:
            timings.append(await _ask(load, number))

    async def visitor(number: int, moment: float) -> None:
        await asyncio.sleep(moment)
        timings.append(await _ask(load, number))

    if load.rate is None:
        work = [client() for _ in range(load.num_clients)]
    else:
        work = [visitor(number, moment) for number, moment in enumerate(load.arrivals())]
    started = time.perf_counter()
    await asyncio.gather(*work)
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
               "gap": [gap for t in timings for gap in t.gaps],
               "longest_gap": [t.longest_gap for t in timings]}  # fmt: skip
    result: dict[str, object] = {
        "num_requests": len(timings), "num_clients": load.num_clients if load.rate is None else None,
        "rate": load.rate, "seconds": seconds,
        "prompt_tokens": sum(t.num_prompt_tokens for t in timings),
        "output_tokens": sum(t.num_output_tokens for t in timings),
        "output_tokens_per_second": sum(t.num_output_tokens for t in timings) / seconds,
    }  # fmt: skip
    for name, values in columns.items():
        result[name] = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES} if values else None
    return result | {"requests": [vars(timing) for timing in timings]}
