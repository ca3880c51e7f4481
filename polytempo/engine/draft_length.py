"""How many drafts each row gets next: what there is room for, and what pays. Numbers only, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polytempo.engine.row import Row
from polytempo.engine.step_cost import LinearCost
from polytempo.engine_config import EngineConfig

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 2.0
"""What is believed of drafts before any was examined, as if so many had said so. Hopeful: too high an estimate corrects
itself within a few drafts, too low a one leaves little to learn from."""
ROW_WEIGHT = 4.0
"""How many drafts of a row's own weigh as much as the engine's average."""
ACCEPTANCE_FADE = 0.995
"""Weight of what became of a row's drafts, per row and verify since: the engine's acceptance is of some 200 of them."""
EXPLORED = (2, 2, 2, 0, 0)
"""Drafts per row after so many timed decode steps, before the cost model is trusted. The first step and the first
drafts are cold and count for nothing. More than one draft, since the more tokens a step has the less each costs (they
share experts): a line through steps with none and with one would never find that two pay."""
MOST_EXPLORED = 32
"""Steps that explore, timed or not: while every step holds some prompt's tokens, none is timed."""
REST = 16
"""Steps without drafts for which a decision to make none holds: it must cost nothing where it gains nothing."""
RETRY_FIRST, RETRY_SOON, RETRY_MOST = 48, 192, 768
"""Steps without drafts after which a few rows make some, to see what they cost now; a stale or unlucky measurement
would otherwise be believed for ever. The wait doubles, up to the second where drafts lose little, to the third where
they clearly lose; all are multiples of REST."""
RETRY_DRAFTS, RETRY_STEPS = 2, 3
"""How many, and how often. The first of these steps may pay for a pause and is timed in part only."""
CLEAR_LOSS = 0.05
"""Part of the expected speed that one draft per row must lose for the longest waits: where it loses less, trying costs
little, and noise decides."""
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
        had_drafts: whether the last timed step verified any; None before the first.
        num_drafting: steps in a row that chose a draft. The first may pay for a pause: it is not timed.
        num_idle: steps in a row that chose none though there was room.
        retry_after: as many of them as are waited for before drafts are tried again.
        num_retrying: steps that try and are still to come.
        is_paying: whether drafts were chosen when plans were last weighed.
        num_paying: steps in a row in which they were, since two without.
        num_explored: steps so far whose lengths were EXPLORED's.
        loss: part of the expected speed that one draft per row would have lost when none were last chosen.
    """

    config: EngineConfig
    verify_cost: LinearCost = field(default_factory=LinearCost)
    draft_cost: LinearCost = field(default_factory=LinearCost)
    examined: float = PRIOR_WEIGHT
    accepted: float = PRIOR_WEIGHT * PRIOR_ACCEPTANCE
    had_drafts: bool | None = None
    num_drafting: int = 0
    num_idle: int = 0
    retry_after: int = RETRY_FIRST
    num_retrying: int = 0
    is_paying: bool = False
    num_paying: int = 0
    num_explored: int = 0
    loss: float = 0.0

    def record(self, row: Row, num_drafted: int, num_accepted: int) -> None:
        """Take in what became of a row's drafts in one verify."""
        row.stats.record(num_drafted, num_accepted)
        if num_drafted:
            self.examined = ACCEPTANCE_FADE * self.examined + min(num_accepted + 1, num_drafted)
            self.accepted = ACCEPTANCE_FADE * self.accepted + num_accepted

    def record_verifying(self, num_tokens: int, has_drafts: bool, seconds: float) -> None:
        """Take in what a decode step took up to its commit, unless the step before was of the other kind.

        A step without drafts right after some with finds less of its weights in the caches and takes longer than the
        next: measured only so, drafts look as if they paid.
        """
        if has_drafts == self.had_drafts:
            self.verify_cost.record(num_tokens, seconds)
        self.had_drafts = has_drafts

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
        free = [place for place, row in enumerate(rows) if row.is_decoding and row.request.params.draft_len is None]
        lengths = [0] * len(rows)
        if len(free) < len(rows):
            lengths = [0 if row.request.params.draft_len is None else draft_length(row, config) for row in rows]
        if self.num_idle % REST:
            self.num_idle += 1
        elif free:
            fixed = [(row, count) for row, count in zip(rows, lengths, strict=True)
                     if row.is_decoding and row.request.params.draft_len is not None]  # fmt: skip
            room = [draft_length(rows[place], config) for place in free]
            for place, count in zip(free, self._choose([rows[place] for place in free], room, fixed), strict=True):
                lengths[place] = count
        self.num_drafting = self.num_drafting + 1 if any(lengths) else 0
        return lengths

    def _choose(self, rows: Sequence[Row], room: Sequence[int], fixed: Sequence[tuple[Row, int]]) -> list[int]:
        """Lengths of rows that leave the choice to the policy, each within its room, beside rows of fixed lengths."""
        if not any(room):
            return [0] * len(rows)
        step = self.verify_cost.count
        if (step < len(EXPLORED) or self.draft_cost.count < 2) and self.num_explored < MOST_EXPLORED:
            self.num_explored += 1
            wanted = EXPLORED[step] if step < len(EXPLORED) else 1
            return [min(most, wanted) for most in room]
        if self.num_retrying:
            self.num_retrying -= 1
            return self._few(room)
        lengths = self._best(rows, room, fixed)
        self.num_paying = self.num_paying + 1 if any(lengths) else 0
        if any(lengths):
            self.num_idle, self.retry_after = 0, RETRY_FIRST
            if self.num_paying > RETRY_FIRST:
                # What steps without drafts cost must be seen again too, or one slow step is believed for ever.
                self.num_paying = 0 if self.num_paying > RETRY_FIRST + 1 else self.num_paying
                return [0] * len(rows)
        elif self.num_idle < self.retry_after:
            self.num_idle += 1
        else:
            self.retry_after = min(2 * self.retry_after, RETRY_SOON if self.loss < CLEAR_LOSS else RETRY_MOST)
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

    def _best(self, rows: Sequence[Row], room: Sequence[int], fixed: Sequence[tuple[Row, int]]) -> list[int]:
        """The lengths of most expected tokens per second.

        Every draft number k of a step comes out of one forward for all rows that get so many. So for each number of
        forwards, drafts are added in order of how likely they are accepted; a row's later drafts are never likelier
        than those before. A row of which little is known is taken for the engine's average.
        """
        if not (self.verify_cost.recent and self.draft_cost.recent):
            return [0] * len(rows)
        base, per_token = self.verify_cost.line
        excess = self.verify_cost.excess
        per_forward, per_draft = self.draft_cost.line
        prior, per_pair = self.accepted / self.examined, per_token + per_draft
        chances = [row.stats.recent_acceptance(prior, ROW_WEIGHT) for row in rows]
        num_fixed, deepest = sum(count for _, count in fixed), max((count for _, count in fixed), default=0)
        num_fed = len(rows) + len(fixed) + num_fixed
        fixed_chances = [(row.stats.recent_acceptance(prior, ROW_WEIGHT), count) for row, count in fixed]
        gained = len(rows) + sum(chance**k for chance, count in fixed_chances for k in range(count + 1))
        line_seconds = base + per_token * num_fed + per_draft * num_fixed
        plain_seconds = line_seconds + deepest * per_forward + excess.get(num_fed, 0.0)
        ranked = sorted(
            (-(chance ** (k + 1)), place, k)
            for place, (chance, most) in enumerate(zip(chances, room, strict=True))
            for k in range(most)
        )
        best, chosen = gained / plain_seconds * (1 if self.is_paying else 1 + LEAST_GAIN), []
        for num_forwards in range(1, max(room) + 1):
            able = [draft for draft in ranked if draft[2] < num_forwards]
            tokens, count = gained, 0
            without = line_seconds + max(num_forwards, deepest) * per_forward
            for num_drafts, (minus_chance, _, _) in enumerate(able, 1):
                tokens -= minus_chance
                seconds = without + per_pair * num_drafts + excess.get(num_fed + num_drafts, 0.0)
                if tokens > best * seconds:
                    best, count = tokens / seconds, num_drafts
            chosen = able[:count] or chosen
        lengths = [0] * len(rows)
        for _, place, _ in chosen:
            lengths[place] += 1
        self.is_paying = bool(chosen)
        if not chosen:
            with_room = [chance for chance, most in zip(chances, room, strict=True) if most]
            seconds = line_seconds + max(1, deepest) * per_forward + per_pair * len(with_room)
            self.loss = 1 - (gained + sum(with_room)) * plain_seconds / (gained * seconds)
        return lengths
