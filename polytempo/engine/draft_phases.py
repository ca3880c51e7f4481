"""When drafts are made whether they pay or not, and when not: exploring, pausing, looking again. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

EXPLORED = (2, 2, 0, 0)
"""Drafts per row after so many timed decode steps, before the cost model is trusted. The first step and the first
drafts are cold and count for nothing. More than one draft, since the more tokens a step has the less each costs (they
share experts): a line through steps with none and with one would never find that two pay."""
EXPLORED_ROWS = (16, 8)
"""Most rows that make them. All of a small batch, for what drafts of a few cost says little of all where tokens share
experts. A large batch has its tokens on every expert and costs are a line: a part of the rows shows its slope, two
parts that of a forward of the MTP block, and the others need not make the keys of a window."""
MOST_EXPLORED = 32
"""Steps that explore, timed or not: while every step holds some prompt's tokens, none is timed."""
REST = 16
"""Steps without drafts for which a decision to make none holds: it must cost nothing where it gains nothing."""
REST_TIMED = 4
"""The last of them, which are timed: the next decision is made by what a step takes then."""
RETRY_FIRST, RETRY_MOST = 96, 192
"""Steps without drafts after which a few rows make some, to see what they cost now; a stale or unlucky measurement
would otherwise be believed for ever. The wait doubles up to the second; both are multiples of REST."""
CLEAR_LOSS, PATIENCE = 0.05, 3
"""Part of the expected speed that one draft per row must lose for waits that are so many times as long: where it loses
less, trying costs little, and noise decides."""
RETRY_DRAFTS, RETRY_STEPS = 2, 3
"""How many, and how often. The first of these steps may pay for a pause and is timed in part only."""
LOOK_FIRST, LOOK_MOST, LOOK_STEPS = 8, 48, 2
"""Steps with drafts after which a few make none, and how many these are. The first of them is not timed, being of
another kind. The wait doubles: a beginning that few and noisy measurements spoke for must not last."""
LEAST_GAIN = 0.03
"""Part of the speed that drafts must promise to gain before a batch that rests begins: its rows then make the keys of
their last window, and the best of many plans is in part the luckiest. A batch that drafts goes on for any gain."""
TRIAL_LOSS, TRIAL_STEPS = 0.03, 16
"""Part of the speed that drafts may seem to lose when they were just tried, and steps for which they go on all the
same: the first drafts after a pause take longer than the next, as do the first steps without."""
FEW_ROWS = 2
"""Rows that try again, or an eighth if those are more: each must first make the keys of a window."""


class Exploring(NamedTuple):
    """The steps before costs are believed.

    Attributes:
        num_steps: so many that explored.
    """

    num_steps: int = 0

    def wanted(self, num_verifies: int, num_proposals: int, room: Sequence[int]) -> list[int] | None:
        """Lengths within the rows' room after so many timings of verifying and of proposing; None to believe costs."""
        if num_verifies >= len(EXPLORED) and num_proposals >= 2 or self.num_steps >= MOST_EXPLORED:
            return None
        num_drafts = EXPLORED[num_verifies] if num_verifies < len(EXPLORED) else 1
        return some_drafts(room, num_drafts, EXPLORED_ROWS[min(num_verifies, len(EXPLORED_ROWS) - 1)])

    def explored(self) -> Exploring:
        """After one more step that explored."""
        return Exploring(self.num_steps + 1)


class Pause(NamedTuple):
    """The steps in which drafts do not pay, and when they are tried again.

    Attributes:
        num_idle: steps in a row that chose no draft though there was room.
        retry_after: as many of them as are waited for before drafts are tried again.
    """

    num_idle: int = 0
    retry_after: int = RETRY_FIRST

    @property
    def is_resting(self) -> bool:
        """Whether the decision to make no draft still holds."""
        return self.num_idle % REST > 0

    @property
    def is_untimed(self) -> bool:
        """Whether what a step takes can be of no use."""
        return 0 < self.num_idle % REST < REST - REST_TIMED

    def is_over(self, loss: float) -> bool:
        """Whether it is time to try again, where one draft per row loses this part of the speed."""
        return self.num_idle >= self.retry_after * (1 if loss < CLEAR_LOSS else PATIENCE)

    def idled(self) -> Pause:
        """After one more step without drafts."""
        return Pause(self.num_idle + 1, self.retry_after)

    def ended(self) -> Pause:
        """After the first step that tries again."""
        return Pause(retry_after=min(2 * self.retry_after, RETRY_MOST))


class Paying(NamedTuple):
    """The steps in which drafts pay, and those that leave them out.

    Attributes:
        num_steps: steps in a row in which they did, since the last that left them out.
        look_after: as many of them make drafts before LOOK_STEPS make none.
    """

    num_steps: int = 0
    look_after: int = LOOK_FIRST

    def weighed(self, pays: bool) -> Paying:
        """After drafts were weighed once more."""
        if not pays:
            return Paying()
        if self.num_steps < self.look_after + LOOK_STEPS:
            return Paying(self.num_steps + 1, self.look_after)
        return Paying(1, min(2 * self.look_after, LOOK_MOST))

    @property
    def is_looking(self) -> bool:
        """Whether to make none: what such steps cost must be seen again too, or one slow step is believed for ever."""
        return self.num_steps > self.look_after


def few_drafts(room: Sequence[int]) -> list[int]:
    """RETRY_DRAFTS for as many rows as it takes to tell what drafts cost."""
    return some_drafts(room, RETRY_DRAFTS, max(FEW_ROWS, sum(map(bool, room)) // 8))


def some_drafts(room: Sequence[int], num_drafts: int, num_rows: int) -> list[int]:
    """So many drafts for the first so many rows that have room, as far as it goes; none for the others."""
    able = [place for place, most in enumerate(room) if most]
    lengths = [0] * len(room)
    for place in able[:num_rows]:
        lengths[place] = min(room[place], num_drafts)
    return lengths
