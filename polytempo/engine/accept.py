"""Which drafts a row keeps: pure, nothing random inside. The target's tokens were sampled before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polytempo.engine_config import AdvanceMode
from polytempo.errors import InvariantError


@dataclass(frozen=True)
class Verdict:
    """What verification says of one row.

    Attributes:
        num_accepted: drafts in the longest prefix that agrees with the target.
        new_token_ids: the tokens to commit, num_accepted drafts and the target's next token (correction or bonus);
            shorter if COHORT holds the row back or the target failed at a position.
        failed_at: index of the verify position whose target token does not exist, None in the normal case; every
            position before it agreed.
    """

    num_accepted: int
    new_token_ids: Sequence[int]
    failed_at: int | None = None


def accept(draft_ids: Sequence[int], target_ids: Sequence[int | None]) -> Verdict:
    """Keep the longest prefix of the drafts that the target would have emitted itself.

    Args:
        draft_ids: k drafts.
        target_ids: k + 1 tokens: the target's own at every verify position, None where it has none.

    Returns:
        The verdict.

    Raises:
        InvariantError: there is not one target token more than there are drafts.

    Source: greedy and drafter-invariant acceptance, arXiv 2408.07978: a draft is accepted iff it is the token that
    the target draws with the same noise.
    """
    if len(target_ids) != len(draft_ids) + 1:
        raise InvariantError(f"{len(draft_ids)} drafts need {len(draft_ids) + 1} target tokens, not {len(target_ids)}")
    for place, token_id in enumerate(target_ids):
        if token_id is None:
            return Verdict(place, list(target_ids[:place]), failed_at=place)
        if place == len(draft_ids) or token_id != draft_ids[place]:
            return Verdict(place, list(target_ids[: place + 1]))
    raise InvariantError("unreachable: the last target token has no draft to agree with")


def advance(verdicts: Sequence[Verdict], mode: AdvanceMode) -> list[Verdict]:
    """Apply an advance mode to the verdicts of one step.

    Args:
        verdicts: one per row.
        mode: PER_SEQUENCE changes nothing; COHORT cuts every row to the shortest, but for rows that failed.

    Returns:
        The verdicts to commit. What a row is held back from is drafted and verified again.
    """
    if mode is AdvanceMode.PER_SEQUENCE:
        return list(verdicts)
    shortest = min((len(verdict.new_token_ids) for verdict in verdicts if verdict.failed_at is None), default=0)
    return [
        verdict
        if verdict.failed_at is not None or len(verdict.new_token_ids) == shortest
        else Verdict(verdict.num_accepted, verdict.new_token_ids[:shortest])
        for verdict in verdicts
    ]
