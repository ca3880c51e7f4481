"""Rows and draft policies for tests of draft lengths: no model, costs and acceptance as told."""

from polytempo.engine.draft_length import DraftPolicy
from polytempo.engine.row import Request, Row
from polytempo.engine_config import EngineConfig
from polytempo.types import SamplingParams


def make_row(num_prompt=10, num_output=3, acceptance=None, **params) -> Row:
    options = SamplingParams(**{"max_tokens": 100, **params})
    request = Request("r", None, [5] * num_prompt, options, 0, frozenset(), (), 0.0)
    row = Row(request, 0, slot=0, output_token_ids=[7] * num_output, kv_len=num_prompt + num_output - 1)
    if acceptance is not None:
        row.stats.recent_examined, row.stats.recent_accepted = 1000.0, 1000.0 * acceptance
    return row


def policy_with(base, per_token, draft_base, per_draft, **options) -> DraftPolicy:
    """A policy whose cost models have seen exactly these straight lines: by tokens, by rows of one MTP forward."""
    policy = DraftPolicy(EngineConfig(**options))
    for size in range(1, 9):
        policy.costs.verify.record(size, base + per_token * size)
        policy.costs.first_draft.record(size, draft_base + per_draft * size)
        policy.costs.later_draft.record(size, draft_base + per_draft * size)
    return policy
