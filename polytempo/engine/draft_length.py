"""How many drafts each row gets next: what there is room for, and what pays. Numbers only, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

from polytempo.engine.row import Row
from polytempo.engine_config import EngineConfig

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
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 2.0
"""What is believed of drafts before any was examined, as if so many had said so. Hopeful: too high an estimate corrects
itself within a few drafts, too low a one leaves little to learn from."""
ROW_WEIGHT = 4.0
"""How many drafts of a row's own weigh as much as the engine's average."""
ACCEPTANCE_FADE = 0.995
"""Weight of what became of a row's drafts, per row and verify since: the engine's acceptance is of some 200 of them."""
EXPLORED = (2, 2, 0, 2, 0)
"""Drafts per row after so many timed decode steps, before the cost model is trusted. The first step and the first
drafts are cold and count for nothing. More than one draft, since the more tokens a step has the less each costs (they
share experts): a line through steps with none and with one would never find that two pay."""
MOST_EXPLORED = 32
"""Steps that explore, timed or not: while every step holds some prompt's tokens, none is timed."""
REST = 8
"""Steps without drafts for which a decision to make none holds: it must cost nothing where it gains nothing."""
RETRY_FIRST, RETRY_MOST = 48, 768
"""Steps without drafts after which a few rows make some, to see what they cost now; a stale or unlucky measurement
would otherwise be believed for ever. The wait doubles while drafts clearly lose; both are multiples of REST."""
RETRY_DRAFTS, RETRY_STEPS = 2, 3
"""How many, and how often. The first of these steps may pay for a pause and is timed in part only."""
CLEAR_LOSS = 0.05
"""Part of the expected speed that one draft per row must lose for a longer wait: where it loses less, trying costs next
to nothing, and noise decides."""
LEAST_GAIN = 0.03
"""Part of the speed that drafts must promise to gain before a batch without any begins: its rows then make the keys of
their last window, and the best of many plans is in part the luckiest. A batch that drafts goes on for any gain."""
FEW_ROWS = 8
"""Rows that try again, or an eighth if those are more: each must first make the keys of a window. All rows explore, for
what drafts of a few cost says little of all."""


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
        """Add one measurement; older ones fade, and the first, of cold caches, is not kept."""
        self.count += 1
        if self.count == 1:
            return
        if self.count < FIT_EVERY or self.count % FIT_EVERY == 0:
            self._line = None
        seen, _ = self.recent.get(size, ([], 0))
        self.recent[size] = ([*seen[1 - MEDIAN_OVER :], seconds], self.count)
        if len(self.recent) > MOST_SIZES:
            del self.recent[min(self.recent, key=lambda size: self.recent[size][1])]

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


@dataclass
class DraftPolicy:
    """Chooses every row's draft length, from its room, its measured acceptance and the measured cost of a step.

    With a fixed draft length every row gets what it has room for. With "auto", of all drafts that could be made those
    most likely to be accepted are made, as many as give the most expected tokens per second. Whatever it chooses, no
    output token changes.

    Attributes:
        config: engine options.
        verify_cost: seconds of target forward and sampling by tokens fed, decode steps only.
        draft_cost: seconds of proposing per forward of the MTP block, by rows in one, a mean over a step's forwards.
        examined: drafts of all rows that the target looked at, older ones fading.
        accepted: of them, accepted.
        num_drafting: steps in a row that chose a draft. The first may pay for a pause: it is not timed.
        num_idle: steps in a row that chose none though there was room.
        retry_after: as many of them as are waited for before drafts are tried again.
        num_retrying: steps that try and are still to come.
        is_paying: whether drafts were chosen when plans were last weighed.
        num_explored: steps so far whose lengths were EXPLORED's.
        loss: part of the expected speed that one draft per row would have lost when none were last chosen.
    """

    config: EngineConfig
    verify_cost: LinearCost = field(default_factory=LinearCost)
    draft_cost: LinearCost = field(default_factory=LinearCost)
    examined: float = PRIOR_WEIGHT
    accepted: float = PRIOR_WEIGHT * PRIOR_ACCEPTANCE
    num_drafting: int = 0
    num_idle: int = 0
    retry_after: int = RETRY_FIRST
    num_retrying: int = 0
    is_paying: bool = False
    num_explored: int = 0
    loss: float = 0.0

    def record(self, row: Row, num_drafted: int, num_accepted: int) -> None:
        """Take in what became of a row's drafts in one verify."""
        row.stats.record(num_drafted, num_accepted)
        if num_drafted:
            self.examined = ACCEPTANCE_FADE * self.examined + min(num_accepted + 1, num_drafted)
            self.accepted = ACCEPTANCE_FADE * self.accepted + num_accepted

    def record_proposing(self, draft_lens: Sequence[int], seconds: float) -> None:
        """Take in what a step's drafts took, unless they are the first after some without: these pay for the pause."""
        if self.num_drafting > 1:
            num_forwards = max(draft_lens)
            self.draft_cost.record(round(sum(draft_lens) / num_forwards), seconds / num_forwards)

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """Drafts for each row's next step.

        Args:
            rows: after their tokens were committed.

        Returns:
            One length per row.
        """
        config = self.config
        if config.draft_len != "auto":
            return [draft_length(row, config) for row in rows]
        free = [place for place, row in enumerate(rows) if row.request.params.draft_len is None]
        lengths = [0] * len(rows)
        if len(free) < len(rows):
            lengths = [0 if row.request.params.draft_len is None else draft_length(row, config) for row in rows]
        if self.num_idle % REST:
            self.num_idle += 1
            self.num_drafting = 0
            return lengths
        room = [draft_length(rows[place], config) for place in free]
        for place, count in zip(free, self._choose([rows[place] for place in free], room), strict=True):
            lengths[place] = count
        self.num_drafting = self.num_drafting + 1 if any(lengths) else 0
        return lengths

    def _choose(self, rows: Sequence[Row], room: Sequence[int]) -> list[int]:
        """Lengths of rows that leave the choice to the policy, each within its room."""
        if not any(room):
            return [0] * len(rows)
        step = self.verify_cost.count
        if step < len(EXPLORED) and self.num_explored < MOST_EXPLORED:
            self.num_explored += 1
            return [min(most, EXPLORED[step]) for most in room]
        if self.draft_cost.count < 2 and step:
            return [min(most, 1) for most in room]
        if self.num_retrying:
            self.num_retrying -= 1
            return self._few(room)
        lengths = self._best(rows, room)
        if any(lengths):
            self.num_idle, self.retry_after = 0, RETRY_FIRST
            if self.num_drafting >= RETRY_FIRST:
                # What a step without drafts costs must be seen again too, or one slow step is believed for ever.
                return [0] * len(rows)
        elif self.num_idle < self.retry_after:
            self.num_idle += 1
        else:
            self.retry_after = RETRY_FIRST if self.loss < CLEAR_LOSS else min(2 * self.retry_after, RETRY_MOST)
            self.num_idle, self.num_retrying = 0, RETRY_STEPS - 1
            return self._few(room)
        return lengths

    @staticmethod
    def _few(room: Sequence[int]) -> list[int]:
        """RETRY_DRAFTS for the first rows that have room, as many as it takes to tell what drafts cost."""
        able = [place for place, most in enumerate(room) if most]
        lengths = [0] * len(room)
        for place in able[: max(FEW_ROWS, len(able) // 8)]:
            lengths[place] = min(room[place], RETRY_DRAFTS)
        return lengths

    def _best(self, rows: Sequence[Row], room: Sequence[int]) -> list[int]:
        """The lengths of most expected tokens per second.

        Every draft number k of a step comes out of one forward for all rows that get so many. So for each number of
        forwards, drafts are added in order of how likely they are accepted; a row's later drafts are never likelier
        than those before. A row of which little is known is taken for the engine's average.
        """
        base, per_token = self.verify_cost.line
        excess = self.verify_cost.excess
        per_forward, per_draft = self.draft_cost.line
        plain_seconds = base + per_token * len(rows) + excess.get(len(rows), 0.0)
        if not plain_seconds:  # no step was ever timed
            return [0] * len(rows)
        prior, per_pair = self.accepted / self.examined, per_token + per_draft
        chances = [row.stats.recent_acceptance(prior, ROW_WEIGHT) for row in rows]
        ranked = sorted(
            (-(chance ** (k + 1)), place, k)
            for place, (chance, most) in enumerate(zip(chances, room, strict=True))
            for k in range(most)
        )
        best, chosen = len(rows) / plain_seconds * (1 if self.is_paying else 1 + LEAST_GAIN), []
        for num_forwards in range(1, max(room) + 1):
            able = [draft for draft in ranked if draft[2] < num_forwards]
            tokens, count = float(len(rows)), 0
            without = base + per_token * len(rows) + num_forwards * per_forward
            for num_drafts, (loss, _, _) in enumerate(able, 1):
                tokens -= loss
                seconds = without + per_pair * num_drafts + excess.get(len(rows) + num_drafts, 0.0)
                if tokens > best * seconds:
                    best, count = tokens / seconds, num_drafts
            chosen = able[:count] or chosen
        lengths = [0] * len(rows)
        for _, place, _ in chosen:
            lengths[place] += 1
        self.is_paying = bool(chosen)
        if not chosen:
            able = [chance for chance, most in zip(chances, room, strict=True) if most]
            seconds = plain_seconds + per_forward + per_pair * len(able)
            self.loss = 1 - (len(rows) + sum(able)) * plain_seconds / (len(rows) * seconds)
        return lengths
