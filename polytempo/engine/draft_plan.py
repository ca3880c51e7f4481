"""Which drafts of one step pay, given what they cost and how likely they are accepted. Pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from polytempo.engine.step_cost import LinearCost


class Plan(NamedTuple):
    """Drafts of one step.

    Attributes:
        lengths: one per row.
        loss: if none pays, the part of the expected speed that one draft for every row with room would lose.
    """

    lengths: list[int]
    loss: float = 0.0


@dataclass
class Costs:
    """What steps were measured to take.

    Attributes:
        verify: seconds of target forward and sampling by tokens fed, decode steps only.
        first_draft: seconds of a step's first forward of the MTP block and all around it, by rows in it.
        later_draft: seconds of each further forward, by rows in it.
    """

    verify: LinearCost = field(default_factory=LinearCost)
    first_draft: LinearCost = field(default_factory=LinearCost)
    later_draft: LinearCost = field(default_factory=LinearCost)


class PlainStep(NamedTuple):
    """A step before drafts are added to it, and what each of them adds.

    Attributes:
        tokens: expected, of all rows.
        num_fed: tokens fed.
        num_forwards: of the MTP block, for the drafts of rows of fixed lengths.
        line_seconds: by the straight lines, but for these forwards.
        first_forward: seconds of the first one and all around it, besides its rows.
        later_forward: of each further one.
        per_first: seconds of making a row's first draft and of verifying it.
        per_later: of each further draft.
        excess: seconds beyond the line of verifying, by tokens fed.
    """

    tokens: float
    num_fed: int
    num_forwards: int
    line_seconds: float
    first_forward: float
    later_forward: float
    per_first: float
    per_later: float
    excess: Mapping[int, float]

    @classmethod
    def of(
        cls, num_rows: int, fixed: Sequence[tuple[float, int]], costs: Costs
    ) -> PlainStep:
        """Rows without drafts beside rows of fixed ones, by what was measured."""
        base, per_token = costs.verify.line
        first_forward, first_draft = costs.first_draft.line
        # Until steps of several drafts were timed, a further one is believed to cost what the first does.
        later_forward, later_draft = (costs.later_draft if costs.later_draft.recent else costs.first_draft).line
        counts = [count for _, count in fixed]
        num_fixed, deepest, num_first = sum(counts), max(counts, default=0), len(counts) - counts.count(0)
        num_fed = num_rows + len(fixed) + num_fixed
        tokens = num_rows + sum([chance**k for chance, count in fixed for k in range(count + 1)])
        line_seconds = base + per_token * num_fed + first_draft * num_first + later_draft * (num_fixed - num_first)
        return cls(
            tokens, num_fed, deepest, line_seconds, first_forward, later_forward, per_token + first_draft,
            per_token + later_draft, costs.verify.excess,
        )  # fmt: skip

    def seconds(self, num_forwards: int) -> float:
        """By the line, if added drafts come out of so many forwards."""
        most = max(num_forwards, self.num_forwards)
        return self.line_seconds + (self.first_forward + (most - 1) * self.later_forward if most else 0.0)

    @property
    def plain_seconds(self) -> float:
        """Without added drafts."""
        return self.seconds(0) + self.excess.get(self.num_fed, 0.0)

    def loss(self, chances: Sequence[float]) -> float:
        """Part of its speed that a first draft of each of these chances loses, by the line."""
        seconds = self.seconds(1) + self.per_first * len(chances)
        return 1 - (self.tokens + sum(chances)) * self.plain_seconds / (self.tokens * seconds)


def best_plan(
    chances: Sequence[float],
    room: Sequence[int],
    fixed: Sequence[tuple[float, int]],
    costs: Costs,
    least_gain: float,
) -> Plan:
    """The lengths of most expected tokens per second.

    Args:
        chances: per row, how likely its first draft is accepted, and each further one if those before it were.
        room: per row, its most drafts.
        fixed: chance and drafts of each row whose length is not to be chosen: the step feeds and makes these anyway.
        costs: as measured.
        least_gain: part of the speed without drafts that they must gain; negative: that they may lose.

    Returns:
        No drafts, and no loss, where either cost was never measured.
    """
    lengths = [0] * len(room)
    if not (costs.verify.recent and costs.first_draft.recent):
        return Plan(lengths)
    step = PlainStep.of(len(room), fixed, costs)
    least = step.tokens / step.plain_seconds * (1 + least_gain)
    drafts = best_drafts(step, chances, room, least)
    if not drafts:
        return Plan(lengths, step.loss([chance for chance, most in zip(chances, room, strict=True) if most]))
    for _, place, _ in drafts:
        lengths[place] += 1
    return Plan(lengths)


def best_drafts(
    step: PlainStep, chances: Sequence[float], room: Sequence[int], least: float
) -> list[tuple[float, int, int]]:
    """The drafts that give most expected tokens per second.

    Every draft number k of a step comes out of one forward for all rows that get so many. So for each number of
    forwards, drafts are added in order of how likely they are accepted; a row's later drafts are never likelier than
    those before.

    Args:
        step: that they are added to.
        chances: as in `best_plan`.
        room: as in `best_plan`.
        least: tokens per second that they must beat.

    Returns:
        Of each draft: its chance of acceptance, its row's place, its number there from 1. Empty if none pays.
    """
    ranked = [
        (chance**k, place, k)
        for place, (chance, most) in enumerate(zip(chances, room, strict=True))
        for k in range(1, most + 1)
    ]
    ranked.sort(key=itemgetter(0), reverse=True)  # of equal chances the first row's come first
    excess = [step.excess.get(step.num_fed + num_drafts, 0.0) for num_drafts in range(len(ranked) + 1)]
    plain_tokens, per_first, per_later = step.tokens, step.per_first, step.per_later
    best, chosen = least, []
    for num_forwards in range(1, max(room) + 1):
        able = [draft for draft in ranked if draft[2] <= num_forwards]
        tokens, by_line, count = plain_tokens, step.seconds(num_forwards), 0
        for num_drafts, (chance, _, k) in enumerate(able, 1):
            tokens += chance
            by_line += per_later if k > 1 else per_first
            seconds = by_line + excess[num_drafts]
            if tokens > best * seconds:
                best, count = tokens / seconds, num_drafts
        chosen = able[:count] or chosen
    return chosen
