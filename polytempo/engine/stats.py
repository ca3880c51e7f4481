"""Counters of speculation, and the formulas over them. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

RECENT_FADE = 0.9


@dataclass
class StepSeconds:
    """Seconds of each phase of one step, or of many added up; see `StepClock` for where a phase ends on a device.

    Attributes:
        plan: choosing segments, packing them, building index tensors.
        forward: the target's layers.
        verify: logits, sampling, acceptance, commit.
        propose: everything the proposer does.
    """

    plan: float = 0.0
    forward: float = 0.0
    verify: float = 0.0
    propose: float = 0.0

    def add(self, other: StepSeconds) -> None:
        """Add another's seconds to these."""
        for name in ("plan", "forward", "verify", "propose"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def total(self) -> float:
        """All phases."""
        return self.plan + self.forward + self.verify + self.propose


@dataclass
class DraftStats:
    """What became of drafts, counted before a stop trims the accepted run.

    Attributes:
        num_verifies: steps in which the row's last token was fed, with or without drafts.
        num_drafted: drafts verified.
        num_accepted: drafts that the target agreed with.
        drafted_at: by place in the run (0 is the first draft), how many were verified.
        accepted_at: by place, how many were accepted.
        recent_examined: drafts that the target looked at (up to the first rejection), older steps fading.
        recent_accepted: of them, accepted.
    """

    num_verifies: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    recent_examined: float = 0.0
    recent_accepted: float = 0.0

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Count one verify."""
        self.num_verifies += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        # A step without drafts fades the past too, so that a row that stopped drafting is tried again.
        self.recent_examined *= RECENT_FADE
        self.recent_accepted *= RECENT_FADE
        if not num_drafted:
            return
        self.recent_examined += min(num_accepted + 1, num_drafted)
        self.recent_accepted += num_accepted
        drafted_at, accepted_at = self.drafted_at, self.accepted_at
        if num_drafted > len(drafted_at):
            missing = [0] * (num_drafted - len(drafted_at))
            drafted_at += missing
            accepted_at += missing
        for place in range(num_drafted):
            drafted_at[place] += 1
        for place in range(num_accepted):
            accepted_at[place] += 1

    def recent_acceptance(self, prior: float, weight: float) -> float:
        """Chance that the target agrees with the next draft, drawn towards `prior` as if `weight` drafts had said so.

        Drafts after a rejection were never examined and tell nothing.
        """
        return (self.recent_accepted + prior * weight) / (self.recent_examined + weight)

    def add(self, other: DraftStats) -> None:
        """Add another's counts to these."""
        self.num_verifies += other.num_verifies
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        for mine, theirs in ((self.drafted_at, other.drafted_at), (self.accepted_at, other.accepted_at)):
            mine += [0] * (len(theirs) - len(mine))
            for place, count in enumerate(theirs):
                mine[place] += count

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts / drafts verified; None without drafts."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / verifies: tokens per target forward of the row; None before the first verify."""
        return 1 + self.num_accepted / self.num_verifies if self.num_verifies else None

    @property
    def acceptance_by_place(self) -> list[float]:
        """Accepted / verified by place in the run; falls with the place, since a run ends at its first rejection."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted_at, self.drafted_at, strict=True)]
