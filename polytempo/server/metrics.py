"""Prometheus metrics: counters and latencies of requests, and the engine's own numbers at the moment of a scrape.

All of one app, in a collector registry of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from polytempo.async_llm import AsyncLLM, RequestStream

_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 3, 5, 10, 30, 60)
UNFINISHED = "abandoned"


class Metrics:
    """What one server counts."""

    def __init__(self, front: AsyncLLM) -> None:
        self.registry = registry = CollectorRegistry()
        self._http = Counter("polytempo_http_responses", "HTTP responses by route and status.",
                             ["path", "status"], registry=registry)  # fmt: skip
        self._choices = Counter("polytempo_choices", "Choices that ended, by reason; 'abandoned' when nobody waited.",
                                ["finish_reason"], registry=registry)  # fmt: skip
        self._prompt = Counter("polytempo_prompt_tokens", "Prompt tokens of accepted requests, each prompt once.",
                               registry=registry)  # fmt: skip
        self._output = Counter("polytempo_output_tokens", "Output tokens of requests that ended.", registry=registry)
        self._ttft = Histogram("polytempo_ttft_seconds", "Arrival to first token, per choice.",
                               buckets=_SECONDS, registry=registry)  # fmt: skip
        self._tpot = Histogram("polytempo_tpot_seconds", "Seconds per token after the first, mean of each choice.",
                               buckets=_SECONDS, registry=registry)  # fmt: skip
        self._e2e = Histogram("polytempo_request_seconds", "Arrival to last token, per choice.",
                              buckets=(*_SECONDS, 120, 300, 600), registry=registry)  # fmt: skip
        registry.register(_EngineCollector(front))

    def count_response(self, path: str, status: int) -> None:
        """Count one HTTP response."""
        self._http.labels(path, str(status)).inc()

    def record(self, stream: RequestStream) -> None:
        """Count one accepted request that has ended, one way or another."""
        self._prompt.inc(sum(len(group[0].request.prompt_token_ids) for group in stream.groups))
        for row, first, last in zip(stream.rows, stream.first_token_at, stream.finished_at, strict=True):
            num_tokens = len(row.output_token_ids)
            self._output.inc(num_tokens)
            self._choices.labels(UNFINISHED if last is None else str(row.finish_reason)).inc()
            if first is not None:
                self._ttft.observe(first - stream.arrival)
            if first is not None and last is not None:
                self._e2e.observe(last - stream.arrival)
                if num_tokens > 1:
                    self._tpot.observe((last - first) / (num_tokens - 1))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads the engine's numbers when asked, so that no second copy of them can go stale."""

    def __init__(self, front: AsyncLLM) -> None:
        self._front = front

    def collect(self) -> Iterator[Metric]:
        """One family per number."""
        front = self._front
        status, seats = front.status, front.llm.engine.config.max_rows
        gauges = {
            "polytempo_rows_running": ("Rows that hold a seat.", len(status.rows)),
            "polytempo_rows_waiting": ("Rows that wait for a seat.", status.num_waiting),
            "polytempo_seats": ("Seats in all (max_rows).", seats),
            "polytempo_state_bytes": ("Memory of the rows' state.", status.state_bytes),
            "polytempo_engine_up": ("1 while the engine lives.", int(front.failure is None)),
        }
        counters = {
            "polytempo_steps": ("Target forwards.", status.num_steps),
            "polytempo_verifies": ("Steps that fed a row's last token, of rows that ended.", status.num_verifies),
            "polytempo_drafted_tokens": ("Drafts verified, of rows that ended.", status.num_drafted),
            "polytempo_accepted_tokens": ("Drafts accepted, of rows that ended.", status.num_accepted),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)
