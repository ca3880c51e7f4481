"""When the phases of a step end. On a device a phase ends when its work is done, not when it was launched."""

from __future__ import annotations

import time

import torch


class StepClock:
    """Marks between phases; begins with the first.

    A device works through what the host launches, in order and behind it. An event at every mark says when the device
    came by, so that no phase waits for it in its midst; only `phases` does, at the end of the step, so that what a step
    launched is never paid for by the next.

    Args:
        device: where the step runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> float:
        """End a phase; returns the seconds since the first mark as the host sees them, without waiting."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        self._times.append(time.perf_counter())
        return self._times[-1] - self._times[0]

    def phases(self) -> list[float]:
        """Seconds between marks, whose sum is the time from the first to the last; waits for the device."""
        ends = self._times
        if self._events:
            first = self._events[0]
            self._events[-1].synchronize()
            passed = [ends[0] + first.elapsed_time(event) / 1e3 for event in self._events]
            ends = [max(both) for both in zip(ends, passed, strict=True)]
        return [end - start for start, end in zip(ends[:-1], ends[1:], strict=True)]
