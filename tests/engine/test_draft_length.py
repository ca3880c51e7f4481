"""How many drafts a row gets: the room it has, and what measured acceptance and cost say pays."""

import pytest

from polytempo.engine.draft_length import EXPLORED, RETRY, DraftPolicy, LinearCost, draft_length
from polytempo.engine.row import Request, Row
from polytempo.engine.stats import DraftStats
from polytempo.engine_config import AUTO_MAX_DRAFTS, EngineConfig
from polytempo.errors import ConfigError
from polytempo.types import SamplingParams


def make_row(num_prompt=10, num_output=3, acceptance=None, **params) -> Row:
    options = SamplingParams(**{"max_tokens": 100, **params})
    request = Request("r", None, [5] * num_prompt, options, 0, frozenset(), (), 0.0)
    row = Row(request, 0, slot=0, output_token_ids=[7] * num_output, kv_len=num_prompt + num_output - 1)
    if acceptance is not None:
        row.stats.recent_examined, row.stats.recent_accepted = 1000.0, 1000.0 * acceptance
    return row


def policy_with(base, per_token, draft_base, per_draft, **options) -> DraftPolicy:
    """A policy whose cost models have seen exactly these straight lines."""
    policy = DraftPolicy(EngineConfig(**options))
    for cost in (policy.verify_cost, policy.draft_cost):
        cost.record(1, 99.0)  # cold: not kept
    for size in range(1, 9):
        policy.verify_cost.record(size, base + per_token * size)
        policy.draft_cost.record(size, draft_base + per_draft * size)
    return policy


@pytest.mark.parametrize(("row", "expected"), [
    (make_row(), 4),
    (make_row(draft_len=2), 2),
    (make_row(draft_len=0), 0),
    (make_row(draft_len=9), 9),
    (make_row(max_tokens=6), 2),  # 3 of 6 are out: a verify of 2 drafts can emit the 3 that are left
    (make_row(max_tokens=4), 0),
    (make_row(num_prompt=58), 2),  # 61 of 64 tokens: three more fit
    (make_row(num_prompt=60), 0),
])  # fmt: skip
def test_room(row, expected):
    config = EngineConfig(draft_len=4, max_model_len=64, max_chunk=32)
    assert draft_length(row, config) == expected
    assert DraftPolicy(config).lengths([row]) == [expected]


def test_rows_in_their_prompt_and_finished_rows_get_none():
    config = EngineConfig(draft_len=4)
    row = make_row(num_output=0)
    row.kv_len = 4
    assert draft_length(row, config) == 0
    from polytempo.types import FinishReason

    done = make_row()
    done.finish(FinishReason.STOP)
    assert draft_length(done, config) == 0


def test_linear_cost_recovers_a_line_and_forgets():
    cost = LinearCost()
    cost.record(50, 1000.0)
    assert cost.fit() == (0.0, 0.0), "the first measurement is cold"
    for size in (1, 4, 9, 2, 7):
        cost.record(size, 0.5 + 0.25 * size)
    assert cost.fit() == pytest.approx((0.5, 0.25))
    for _ in range(800):
        for size in (1, 5):
            cost.record(size, 2.0 + 0.1 * size)
    assert cost.fit() == pytest.approx((2.0, 0.1), rel=1e-2)
    constant = LinearCost()
    for _ in range(5):
        constant.record(3, 0.9)
    assert constant.fit() == pytest.approx((0.9, 0.0))
    noisy = LinearCost()
    for size, seconds in ((1, 9.0), (1, 2.0), (8, 1.0)):
        noisy.record(size, seconds)
    assert noisy.fit()[1] == 0.0, "more tokens never cost less"


def test_a_batch_that_settles_on_one_size_does_not_forget_what_a_token_costs():
    """With one size left, all of a step would look like base, and more drafts like a present."""
    cost = LinearCost()
    for size in (1, 1, 2, 3):
        cost.record(size, 1.0 + 0.5 * size)
    for _ in range(500):
        cost.record(6, 4.0)
    assert cost.fit() == pytest.approx((1.0, 0.5), rel=1e-2)


def test_sizes_are_remembered_in_bounds():
    cost = LinearCost()
    for size in range(1000):
        cost.record(size, 1.0 + size)
    assert len(cost.means) <= 32 and cost.fit() == pytest.approx((1.0, 1.0), rel=1e-3)


def test_auto_drafts_where_it_pays():
    """Cheap tokens and likely drafts: long runs. Dear tokens or unlikely drafts: none."""
    eager = policy_with(base=1.0, per_token=0.001, draft_base=0.0, per_draft=0.001)
    assert eager.lengths([make_row(acceptance=0.95)]) == [AUTO_MAX_DRAFTS]
    dear = policy_with(base=0.01, per_token=1.0, draft_base=0.0, per_draft=0.5)
    assert dear.lengths([make_row(acceptance=0.95)]) == [0]
    middle = policy_with(base=1.0, per_token=0.1, draft_base=0.05, per_draft=0.1)
    assert middle.lengths([make_row(acceptance=0.02)]) == [0]


def test_auto_is_per_row_and_in_order_of_acceptance():
    policy = policy_with(base=1.0, per_token=0.15, draft_base=0.0, per_draft=0.05)
    rows = [make_row(acceptance=chance) for chance in (0.2, 0.9, 0.6)]
    lengths = policy.lengths(rows)
    assert lengths[1] > lengths[2] > lengths[0]
    assert policy.lengths(rows[::-1]) == lengths[::-1], "a function of the rows, not of their order"
    assert policy.lengths(rows) == lengths, "deterministic given its inputs"


def test_auto_is_the_best_of_all_uniform_lengths():
    """For rows alike, its expected tokens per second are at least those of every fixed length."""
    base, per_token, draft_base, per_draft = 1.0, 0.08, 0.02, 0.06
    policy = policy_with(base, per_token, draft_base, per_draft)
    for chance in (0.1, 0.3, 0.5, 0.7, 0.9):
        for num_rows in (1, 4, 16, 64):
            rows = [make_row(acceptance=chance) for _ in range(num_rows)]

            def rate(lengths, chance=chance, num_rows=num_rows):
                tokens = sum((1 - chance ** (k + 1)) / (1 - chance) for k in lengths)
                drafts = sum(lengths)
                propose = draft_base + per_draft * drafts if drafts else 0.0
                return tokens / (base + per_token * (num_rows + drafts) + propose)

            chosen = rate(policy.lengths(rows))
            assert chosen >= max(rate([k] * num_rows) for k in range(AUTO_MAX_DRAFTS + 1)) * 0.999


def test_auto_respects_a_requests_own_length_and_explores_first():
    dear = policy_with(base=0.01, per_token=1.0, draft_base=0.0, per_draft=0.5)
    assert dear.lengths([make_row(acceptance=0.9, draft_len=3), make_row(acceptance=0.9)]) == [3, 0]
    fresh = DraftPolicy(EngineConfig())
    seen = []
    for _ in range(EXPLORED):
        seen += fresh.lengths([make_row()])
        fresh.verify_cost.record(1 + seen[-1], 1.0)
    assert len(set(seen)) > 1


def test_auto_tries_again_after_many_steps_without_drafts():
    """Once in RETRY steps, one draft for every row that has room; what was measured then decides on."""
    policy = policy_with(base=0.01, per_token=1.0, draft_base=0.0, per_draft=0.5)
    rows = [make_row(acceptance=0.9), make_row(acceptance=0.9, max_tokens=4)]
    chosen = [policy.lengths(rows) for _ in range(2 * RETRY)]
    assert [place for place, lengths in enumerate(chosen) if any(lengths)] == [RETRY - 1, 2 * RETRY - 1]
    assert chosen[RETRY - 1] == [1, 0]
    for _ in range(40):
        for size in range(1, 9):
            policy.verify_cost.record(size, 0.1 + 0.0005 * size)
            policy.draft_cost.record(size, 0.001 * size)
    assert [policy.lengths(rows)[0] for _ in range(2 * RETRY)] == [AUTO_MAX_DRAFTS] * 2 * RETRY


def test_recent_acceptance_fades_towards_the_prior():
    """A row that stopped drafting is tried again; drafts behind a rejection were never examined."""
    stats = DraftStats()
    for _ in range(20):
        stats.record(num_drafted=4, num_accepted=0)
    low = stats.recent_acceptance(0.5, 2.0)
    assert low < 0.15
    for _ in range(60):
        stats.record(num_drafted=0, num_accepted=0)
    assert stats.recent_acceptance(0.5, 2.0) > 0.45
    one = DraftStats()
    one.record(num_drafted=5, num_accepted=2)
    assert (one.recent_examined, one.recent_accepted) == (3, 2)


@pytest.mark.parametrize("value", [-1, 2.5, "often", True, 256])
def test_bad_draft_len_is_refused(value):
    with pytest.raises(ConfigError, match="draft_len"):
        EngineConfig(draft_len=value)
