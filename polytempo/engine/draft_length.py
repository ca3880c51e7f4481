"""How many drafts each row gets next: what there is room for, and what pays. Numbers only, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polytempo.engine.draft_phases import (
    LEAST_GAIN,
    RETRY_STEPS,
    TRIAL_LOSS,
    TRIAL_STEPS,
    Exploring,
    Pause,
    Paying,
    few_drafts,
)
from polytempo.engine.draft_plan import Costs, Plan, best_plan
from polytempo.engine.row import Row
from polytempo.engine.step_cost import Pace
from polytempo.engine_config import EngineConfig

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 2.0
"""What is believed of drafts before any was examined, as if so many had said so. Hopeful: too high an estimate corrects
itself within a few drafts, too low a one leaves little to learn from."""
ROW_WEIGHT = 4.0
"""How many drafts of a row's own weigh as much as the engine's average."""
ACCEPTANCE_FADE = 0.995
"""Weight of what became of a row's drafts, per row and verify since: the engine's acceptance is of some 200 of them."""


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
    num_tokens, params = row.num_tokens, row.request.params
    if row.is_finished or not row.is_decoding or num_tokens == row.undrafted_len:
        return 0
    wanted = config.most_drafts if params.draft_len is None else params.draft_len
    room = config.max_model_len - num_tokens
    if params.max_tokens is not None:
        room = min(room, params.max_tokens - len(row.output_token_ids))
    return max(0, min(wanted, room - 1, config.max_chunk - 1))


@dataclass
class Acceptance:
    """How many drafts of all rows the target accepts.

    Attributes:
        examined: drafts that the target looked at, older ones fading.
        accepted: of them, accepted.
    """

    examined: float = PRIOR_WEIGHT
    accepted: float = PRIOR_WEIGHT * PRIOR_ACCEPTANCE

    @property
    def rate(self) -> float:
        """What is believed of a draft of which nothing else is known."""
        return self.accepted / self.examined

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Take in what became of one row's drafts, at least one."""
        self.examined = ACCEPTANCE_FADE * self.examined + min(num_accepted + 1, num_drafted)
        self.accepted = ACCEPTANCE_FADE * self.accepted + num_accepted


@dataclass
class DraftPolicy:
    """Chooses every row's draft length, from its room, its measured acceptance and the measured cost of a step.

    With a fixed draft length every row gets what it has room for. With "auto", of all drafts that could be made those
    most likely to be accepted are made, as many as give the most expected tokens per second. Whatever it chooses, no
    output token changes.

    Attributes:
        config: engine options.
        costs: of steps, divided by the machine's pace at their time.
        pace: of the machine.
        had_drafts: whether the last timed step verified any; None before the first.
        num_drafting: steps in a row that chose a draft. The first may pay for a pause: it is not timed.
        acceptance: of all rows' drafts.
        exploring: how far it went.
        pause: how long no draft has paid, and when to try again.
        paying: how long drafts have paid.
        num_trials: steps to come that try drafts: down to TRIAL_STEPS a few rows make some whatever they cost; in the
            last TRIAL_STEPS drafts go on though they seem to lose a little.
    """

    config: EngineConfig
    costs: Costs = field(default_factory=Costs)
    pace: Pace = field(default_factory=Pace)
    had_drafts: bool | None = None
    num_drafting: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    exploring: Exploring = Exploring()
    pause: Pause = Pause()
    paying: Paying = Paying()
    num_trials: int = 0

    def record(self, row: Row, num_drafted: int, num_accepted: int) -> None:
        """Take in what became of a row's drafts in one verify."""
        row.stats.record(num_drafted, num_accepted)
        if num_drafted:
            self.acceptance.record(num_drafted, num_accepted)

    def record_verifying(self, num_tokens: int, has_drafts: bool, seconds: float) -> None:
        """Take in what a decode step took up to its commit, unless the step before was of the other kind or in a rest.

        A step without drafts right after some with finds less of its weights in the caches and takes longer than the
        next: measured only so, drafts look as if they paid.
        """
        if has_drafts == self.had_drafts and not self.pause.is_untimed:
            self.pace.record(seconds, self.costs.verify.expected(num_tokens))
            self.costs.verify.record(num_tokens, seconds / self.pace.slowness)
        self.had_drafts = has_drafts

    def record_proposing(self, draft_lens: Sequence[int], seconds: float, later_seconds: Sequence[float]) -> None:
        """Take in what a step's drafts took, unless they are the first after some without: these pay for the pause.

        Args:
            draft_lens: drafts of each row.
            seconds: in all.
            later_seconds: of them, those of each forward of the MTP block but the first.
        """
        if self.num_drafting > 1:
            slowness = self.pace.slowness
            num_rows = len(draft_lens) - draft_lens.count(0)
            self.costs.first_draft.record(num_rows, (seconds - sum(later_seconds)) / slowness)
            for depth, later in enumerate(later_seconds, 1):
                num_rows -= draft_lens.count(depth)
                self.costs.later_draft.record(num_rows, later / slowness)

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
        is_fixed = [row.request.params.draft_len is not None for row in rows]
        if self.pause.is_resting and not any(is_fixed):
            self.pause, self.num_drafting = self.pause.idled(), 0
            return [0] * len(rows)
        room = [draft_length(row, config) for row in rows]
        lengths = [most if fixed else 0 for most, fixed in zip(room, is_fixed, strict=True)]
        decoding = [place for place, row in enumerate(rows) if room[place] or row.is_decoding]
        free = [place for place in decoding if not is_fixed[place]]
        if self.pause.is_resting:
            self.pause = self.pause.idled()
        elif free:
            fixed = [(rows[place], room[place]) for place in decoding if is_fixed[place]]
            chosen = self._choose([rows[place] for place in free], [room[place] for place in free], fixed)
            for place, count in zip(free, chosen, strict=True):
                lengths[place] = count
        self.num_drafting = self.num_drafting + 1 if any(lengths) else 0
        return lengths

    def _choose(self, rows: Sequence[Row], room: Sequence[int], fixed: Sequence[tuple[Row, int]]) -> list[int]:
        """Lengths of rows that leave the choice to the policy, each within its room, beside rows of fixed lengths."""
        if not any(room):
            return [0] * len(rows)
        wanted = self.exploring.wanted(self.costs.verify.count, self.costs.first_draft.count, room)
        if wanted is not None:
            self.exploring, self.num_trials = self.exploring.explored(), TRIAL_STEPS
            return wanted
        if self.num_trials > TRIAL_STEPS:
            self.num_trials -= 1
            return few_drafts(room)
        plan = self._weigh(rows, room, fixed)
        pays = any(plan.lengths)
        self.paying = self.paying.weighed(pays)
        self.num_trials = max(0, self.num_trials - 1) if pays else 0
        if pays:
            self.pause = Pause()
            return [0] * len(rows) if self.paying.is_looking else plan.lengths
        if self.pause.is_over(plan.loss):
            self.pause, self.num_trials = self.pause.ended(), TRIAL_STEPS + RETRY_STEPS - 1
            return few_drafts(room)
        self.pause = self.pause.idled()
        return plan.lengths

    def _weigh(self, rows: Sequence[Row], room: Sequence[int], fixed: Sequence[tuple[Row, int]]) -> Plan:
        """What pays, by what was measured; a row of which little is known is taken for the engine's average."""
        prior = self.acceptance.rate
        chances = [row.stats.recent_acceptance(prior, ROW_WEIGHT) for row in rows]
        fixed_chances = [(row.stats.recent_acceptance(prior, ROW_WEIGHT), count) for row, count in fixed]
        least_gain = -TRIAL_LOSS if self.num_trials else 0.0 if self.paying.num_steps else LEAST_GAIN
        return best_plan(chances, room, fixed_chances, self.costs, least_gain)
