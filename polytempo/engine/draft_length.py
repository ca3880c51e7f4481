"""How many drafts each row gets next: what there is room for, and what pays. Numbers only, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polytempo.engine.row import Row
from polytempo.engine_config import EngineConfig

FORGET = 0.99
"""Weight of a size that was not seen again, per measurement since."""
MEAN_OVER = 10
"""Measurements that a size's mean goes over."""
MOST_SIZES = 32
"""Sizes that are remembered."""
PRIOR_ACCEPTANCE = 0.5
PRIOR_WEIGHT = 2.0
EXPLORED = 3
"""Timed steps of each kind before the cost model is trusted; the first is cold and counts for nothing."""
RETRY = 200
"""Steps without drafts after which one is made to see what it costs now. A stale or unlucky measurement would otherwise
be believed for ever; one draft in so many steps costs well under 1 %."""


def draft_length(row: Row, config: EngineConfig) -> int:
    """Most drafts that a row's next step has room for.

    A verify of k drafts emits up to k + 1 tokens, so no draft is made that max_tokens or the context would cut off;
    a row that is still in its prompt gets none.

    Args:
        row: after its tokens were committed.
        config: gives the engine's draft length and limits.

    Returns:
        0 … the request's own draft length, or the engine's if the request names none.
    """
    if row.is_finished or not row.is_decoding:
        return 0
    params = row.request.params
    wanted = config.most_drafts if params.draft_len is None else params.draft_len
    room = config.max_model_len - row.num_tokens
    if params.max_tokens is not None:
        room = min(room, params.max_tokens - len(row.output_token_ids))
    return max(0, min(wanted, room - 1, config.max_chunk - 1))


@dataclass
class LinearCost:
    """Seconds as base + slope · size, by weighted least squares through the recent mean of every size that was seen.

    A mean per size, not a sum over steps: a batch that settles on one size for long would else forget the others, and
    with them what a token costs.

    Attributes:
        count: measurements so far.
        means: size -> (recent mean seconds, measurements, number of the last one).
    """

    count: int = 0
    means: dict[int, tuple[float, int, int]] = field(default_factory=dict)

    def record(self, size: int, seconds: float) -> None:
        """Add one measurement; older ones fade, and the first, of cold caches, is not kept."""
        self.count += 1
        if self.count == 1:
            return
        mean, seen, _ = self.means.get(size, (0.0, 0, 0))
        seen += 1
        self.means[size] = (mean + (seconds - mean) / min(seen, MEAN_OVER), seen, self.count)
        if len(self.means) > MOST_SIZES:
            del self.means[min(self.means, key=lambda size: self.means[size][2])]

    def fit(self) -> tuple[float, float]:
        """Base and slope, neither negative. Sizes that never vary tell no slope: all of it is then base."""
        if not self.means:
            return 0.0, 0.0
        points = [
            (size, mean, min(seen, MEAN_OVER) * max(FORGET ** (self.count - last), 1e-6))
            for size, (mean, seen, last) in self.means.items()
        ]
        weight = sum(w for _, _, w in points)
        mean_size = sum(w * size for size, _, w in points) / weight
        mean_seconds = sum(w * seconds for _, seconds, w in points) / weight
        variance = sum(w * (size - mean_size) ** 2 for size, _, w in points)
        covariance = sum(w * (size - mean_size) * (seconds - mean_seconds) for size, seconds, w in points)
        slope = max(0.0, covariance / variance) if variance else 0.0
        slope = min(slope, mean_seconds / mean_size if mean_size else 0.0)
        return mean_seconds - slope * mean_size, slope


@dataclass
class DraftPolicy:
    """Chooses every row's draft length, from its room, its measured acceptance and the measured cost of a step.

    With a fixed draft length every row gets what it has room for. With "auto" drafts are added one depth at a time,
    to the rows most likely to have them accepted first, for as long as expected tokens per second rise. Whatever
    it chooses, no output token changes.

    Attributes:
        config: engine options.
        verify_cost: seconds of target forward and sampling by tokens fed, decode steps only.
        draft_cost: seconds of proposing by (draft, row) pairs.
        num_idle: steps in a row that chose no draft though there was room.
    """

    config: EngineConfig
    verify_cost: LinearCost = field(default_factory=LinearCost)
    draft_cost: LinearCost = field(default_factory=LinearCost)
    num_idle: int = 0

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """Drafts for each row's next step.

        Args:
            rows: after their tokens were committed.

        Returns:
            One length per row.
        """
        room = [draft_length(row, self.config) for row in rows]
        if self.config.draft_len != "auto":
            return room
        is_free = [row.request.params.draft_len is None for row in rows]
        fixed = [0 if free else most for most, free in zip(room, is_free, strict=True)]
        free = [place for place, most in enumerate(room) if is_free[place] and most]
        for place, count in zip(free, self._choose([rows[i] for i in free], [room[i] for i in free]), strict=True):
            fixed[place] = count
        return fixed

    def _choose(self, rows: Sequence[Row], room: Sequence[int]) -> list[int]:
        if self.verify_cost.count < EXPLORED or self.draft_cost.count < EXPLORED:
            # Vary the size, so that base and slope can be told apart.
            return [min(most, 1 + self.verify_cost.count % 2) for most in room]
        lengths = self._best(rows, room)
        self.num_idle = 0 if any(lengths) or not rows else self.num_idle + 1
        if self.num_idle < RETRY:
            return lengths
        self.num_idle = 0
        return [min(most, 1) for most in room]

    def _best(self, rows: Sequence[Row], room: Sequence[int]) -> list[int]:
        """The lengths of most expected tokens per second."""
        base, per_token = self.verify_cost.fit()
        draft_base, per_draft = self.draft_cost.fit()
        chances = [row.stats.recent_acceptance(PRIOR_ACCEPTANCE, PRIOR_WEIGHT) for row in rows]
        lengths = [0] * len(rows)
        tokens, seconds = float(len(rows)), base + per_token * len(rows)
        gains = list(chances)
        for depth in range(1, max(room, default=0) + 1):
            able = [place for place, most in enumerate(room) if most >= depth and lengths[place] == depth - 1]
            able.sort(key=lambda place: -gains[place])
            best, kept = tokens / seconds if seconds else 0.0, 0
            new_tokens, new_seconds = tokens, seconds + (draft_base if depth == 1 else 0.0)
            chosen = (tokens, seconds)
            for count, place in enumerate(able, start=1):
                new_tokens += gains[place]
                new_seconds += per_token + per_draft
                if new_seconds and new_tokens / new_seconds > best:
                    best, kept, chosen = new_tokens / new_seconds, count, (new_tokens, new_seconds)
            if not kept:
                break
            tokens, seconds = chosen
            for place in able[:kept]:
                lengths[place] = depth
                gains[place] *= chances[place]
        return lengths
