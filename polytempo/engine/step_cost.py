"""What a step costs as a function of its size, from measurements. Numbers only, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median_low

FORGET = 0.99
"""Weight of a size that was not seen again, per measurement since."""
MEDIAN_OVER = 9
"""Measurements that a size's median goes over."""
FIT_EVERY = 8
"""Measurements between two fits: one takes longer than choosing lengths."""
MOST_SIZES = 32
"""Sizes that are remembered."""
OWN_WEIGHT = 2.0
"""How many fresh measurements of a size's own weigh as much as the line through all: experts make costs concave."""
PACE_GAIN = 0.3
"""How much of a step's surprise is laid to the machine's pace: it is followed within some four steps."""
MOST_SURPRISE = 1.25
"""Most that one step may say of it, either way: something else that ran for a moment is not a pace."""


@dataclass
class Pace:
    """How slow the machine runs at present, against what its costs are measured in.

    Clocks, other programs and other tenants make every step a third longer for a second and then let go. Costs of steps
    with and without drafts are seen at different times; divided by the pace of their time they can be compared.

    Attributes:
        slowness: 1 at first; only its changes mean anything.
    """

    slowness: float = 1.0

    def record(self, seconds: float, expected: float) -> None:
        """Take in one step, which should take so many seconds at slowness 1; 0 if nobody knows."""
        if expected > 0.0 and seconds > 0.0:
            surprise = seconds / (expected * self.slowness)
            self.slowness *= min(max(surprise, 1 / MOST_SURPRISE), MOST_SURPRISE) ** PACE_GAIN


@dataclass
class LinearCost:
    """Seconds as base + slope · size, by weighted least squares through the recent median of every size that was seen.

    A median per size, not a sum over steps: a batch that settles on one size for long would else forget the others, and
    with them what a token costs. The low median, since whatever else a machine does makes steps longer, never shorter.

    Attributes:
        count: measurements so far.
        recent: size -> (last MEDIAN_OVER seconds, number of the last measurement).
        excess: size -> seconds that it is believed to take beyond the line, as of the last fit.
    """

    count: int = 0
    recent: dict[int, tuple[list[float], int]] = field(default_factory=dict)
    excess: dict[int, float] = field(default_factory=dict)
    _line: tuple[float, float] | None = None

    def record(self, size: int, seconds: float) -> None:
        """Add one measurement; older ones fade."""
        self.count += 1
        if self.count < FIT_EVERY or self.count % FIT_EVERY == 0:
            self._line = None
        seen, _ = self.recent.get(size, ([], 0))
        self.recent[size] = ([*seen[1 - MEDIAN_OVER :], seconds], self.count)
        if len(self.recent) > MOST_SIZES:
            del self.recent[min(self.recent, key=lambda size: self.recent[size][1])]

    def expected(self, size: int) -> float:
        """Seconds that this size is believed to take; 0 if it was never measured."""
        if size not in self.recent:
            return 0.0
        base, slope = self.line
        return base + slope * size + self.excess.get(size, 0.0)

    @property
    def line(self) -> tuple[float, float]:
        """Base and slope, neither negative; at most FIT_EVERY measurements old."""
        if self._line is None:
            self._line = self._fit()
        return self._line

    def _fit(self) -> tuple[float, float]:
        if not self.recent:
            return 0.0, 0.0
        points = [
            (size, median_low(seen), len(seen) * max(FORGET ** (self.count - last), 1e-6))
            for size, (seen, last) in self.recent.items()
        ]
        if len(points) == 1:
            return points[0][1], 0.0
        weight = sum(w for _, _, w in points)
        mean_size = sum(w * size for size, _, w in points) / weight
        mean_seconds = sum(w * seconds for _, seconds, w in points) / weight
        variance = sum(w * (size - mean_size) ** 2 for size, _, w in points)
        covariance = sum(w * (size - mean_size) * (seconds - mean_seconds) for size, seconds, w in points)
        slope = min(max(0.0, covariance / variance), mean_seconds / mean_size)
        base = mean_seconds - slope * mean_size
        self.excess = {size: (seconds - base - slope * size) * w / (w + OWN_WEIGHT) for size, seconds, w in points}
        return base, slope
