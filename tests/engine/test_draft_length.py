"""How many drafts a row gets: the room it has, and what the policy chooses over time."""

import itertools

import pytest
from draft_support import make_row, policy_with

from polytempo.engine.draft_length import DraftPolicy, draft_length
from polytempo.engine.draft_phases import (
    EXPLORED,
    EXPLORED_ROWS,
    FEW_ROWS,
    LOOK_FIRST,
    LOOK_MOST,
    MOST_EXPLORED,
    PATIENCE,
    REST,
    REST_TIMED,
    RETRY_DRAFTS,
    RETRY_FIRST,
    RETRY_MOST,
    RETRY_STEPS,
    Pause,
)
from polytempo.engine.draft_plan import Plan, best_plan
from polytempo.engine.stats import DraftStats
from polytempo.engine_config import AUTO_MAX_DRAFTS, EngineConfig
from polytempo.errors import ConfigError


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


def test_auto_respects_a_requests_own_length():
    dear = policy_with(base=0.01, per_token=1.0, draft_base=0.0, per_draft=0.5)
    assert dear.lengths([make_row(acceptance=0.9, draft_len=3), make_row(acceptance=0.9)]) == [3, 0]


def test_auto_explores_first():
    """Steps with two drafts and none: what a token and a draft cost is measured before either is believed."""
    policy, row = DraftPolicy(EngineConfig()), make_row()
    seen = []
    for _ in range(len(EXPLORED)):
        seen.append(policy.lengths([row])[0])
        policy.costs.verify.record(1 + seen[-1], 0.01 + seen[-1])
        if seen[-1]:
            policy.costs.first_draft.record(seen[-1], 1.0)
    assert seen == list(EXPLORED) and set(seen) == {0, 2}
    assert len(policy.costs.verify.recent) == 2
    assert policy.lengths([row]) == [0], "dear drafts"
    cold = DraftPolicy(EngineConfig())
    for size in range(1, 9):
        cold.costs.verify.record(size, 1.0)
    assert cold.lengths([row]) == [1], "no draft was timed yet"


def test_of_a_large_batch_a_part_explores():
    """Two parts of it, for two sizes of a forward of the MTP block; all of a small one."""
    for num_rows in (4, max(EXPLORED_ROWS), 128):
        policy, rows = DraftPolicy(EngineConfig()), [make_row(max_tokens=3), *(make_row() for _ in range(num_rows))]
        for most in EXPLORED_ROWS:
            count = min(num_rows, most)
            assert policy.lengths(rows) == [0] + [EXPLORED[0]] * count + [0] * (num_rows - count)
            policy.costs.verify.record(num_rows, 1.0)
    assert num_rows > 2 * max(EXPLORED_ROWS) and EXPLORED_ROWS[0] > EXPLORED_ROWS[1]


def test_auto_tries_again_after_many_steps_without_drafts():
    """A few drafts for rows with room, ever more seldom where they lose much; what was measured then decides."""
    policy = policy_with(base=0.01, per_token=1.0, draft_base=0.0, per_draft=0.5)
    rows = [make_row(acceptance=0.9), make_row(acceptance=0.9, max_tokens=4)]
    waits = retry_waits(policy, rows, 6 * PATIENCE * RETRY_MOST)
    assert waits[:2] == [PATIENCE * RETRY_FIRST, PATIENCE * 2 * RETRY_FIRST] and RETRY_MOST == 2 * RETRY_FIRST
    assert set(waits[2:]) == {PATIENCE * RETRY_MOST} and len(waits) > 4
    for num_rows, few in ((1, 1), (9, FEW_ROWS), (128, 16)):
        many = [make_row(acceptance=0.9) for _ in range(num_rows)]
        policy.pause, policy.num_trials = Pause(num_idle=PATIENCE * RETRY_MOST, retry_after=RETRY_MOST), 0
        assert sum(policy.lengths(many)) == few * RETRY_DRAFTS
    policy.pause, policy.num_trials = Pause(retry_after=RETRY_MOST), 0
    for _ in range(40):
        for size in range(1, 9):
            policy.costs.verify.record(size, 0.1 + 0.0005 * size)
            policy.costs.first_draft.record(size, 0.001 * size)
            policy.costs.later_draft.record(size, 0.001 * size)
    chosen = [policy.lengths(rows)[0] for _ in range(4 * LOOK_MOST + 12)]
    waits = [LOOK_FIRST, 2 * LOOK_FIRST, 4 * LOOK_FIRST, LOOK_MOST, LOOK_MOST]
    expected = [count for wait in waits for count in [AUTO_MAX_DRAFTS] * wait + [0, 0]]
    assert chosen[: len(expected)] == expected, "two without, ever more seldom"
    assert policy.pause.retry_after == RETRY_FIRST


def retry_waits(policy, rows, steps):
    """Steps without drafts between the runs of RETRY_STEPS in which the first row has RETRY_DRAFTS."""
    chosen = [policy.lengths(rows) for _ in range(steps)]
    runs = [(any(lengths), sum(1 for _ in run)) for lengths, run in itertools.groupby(chosen)]
    assert {count for drafts, count in runs[:-1] if drafts} == {RETRY_STEPS}
    assert {tuple(lengths) for lengths in chosen} == {(0, 0), (RETRY_DRAFTS, 0)}
    return [count for drafts, count in runs[:-1] if not drafts]


def test_auto_tries_again_soon_where_drafts_lose_little():
    """A draft that always fails, for 4 and for 6 hundredths of a step's time."""
    for per_draft, patience in ((0.04, 1), (0.06, PATIENCE)):
        policy = policy_with(base=1.0, per_token=0.0, draft_base=0.0, per_draft=per_draft)
        waits = retry_waits(policy, [make_row(acceptance=0.0), make_row(max_tokens=4)], 12 * RETRY_MOST)
        longest = patience * RETRY_MOST
        assert waits[0] == patience * RETRY_FIRST and waits[-2:] == [longest] * 2 and max(waits) == longest


def test_steps_that_are_never_timed_end_the_exploring():
    """While each step holds some prompt's tokens, none is timed: two drafts per row went on for ever."""
    policy, row = DraftPolicy(EngineConfig()), make_row()
    chosen = [policy.lengths([row])[0] for _ in range(MOST_EXPLORED + RETRY_FIRST + RETRY_STEPS + REST)]
    retried = [RETRY_DRAFTS] * RETRY_STEPS
    assert chosen == [EXPLORED[0]] * MOST_EXPLORED + [0] * RETRY_FIRST + retried + [0] * REST
    assert policy.exploring.num_steps == MOST_EXPLORED
    assert best_plan([0.7], [4], [], policy.costs, least_gain=0.0) == Plan([0], loss=0.0)
    once = DraftPolicy(EngineConfig())
    once.costs.verify.record(3, 1.0)
    chosen = [once.lengths([row])[0] for _ in range(MOST_EXPLORED + RETRY_FIRST)]
    assert chosen == [EXPLORED[1]] * MOST_EXPLORED + [0] * RETRY_FIRST, "nor after one that was timed"
    some = DraftPolicy(EngineConfig())
    for size in (3, 3, 1, 3, 1):
        some.costs.verify.record(size, 1.0)
    chosen = [some.lengths([row])[0] for _ in range(MOST_EXPLORED + RETRY_FIRST)]
    assert chosen == [1] * MOST_EXPLORED + [0] * RETRY_FIRST, "nor while no draft was"


def test_a_row_of_its_own_length_does_not_end_the_drafting_of_others():
    """Its drafts went on through the one step without, which then never ended for the others."""
    policy = policy_with(base=1.0, per_token=0.001, draft_base=0.0, per_draft=0.001)
    rows = [make_row(acceptance=0.9, draft_len=3), make_row(acceptance=0.95)]
    chosen = [policy.lengths(rows)[1] for _ in range(3 * LOOK_MOST)]
    assert chosen.count(0) == 8 and chosen[LOOK_FIRST] == 0


def test_auto_rests_while_drafts_do_not_pay():
    """A decision to make none holds for REST steps, but for rows whose request names a length."""
    policy = policy_with(base=0.01, per_token=1.0, draft_base=0.0, per_draft=0.5)
    row, own = make_row(acceptance=0.9), make_row(draft_len=3)
    assert policy.lengths([row]) == [0]
    for size in range(1, 9):
        for _ in range(9):
            policy.costs.verify.record(size, 1.0)
            policy.costs.first_draft.record(size, 1e-6)
            policy.costs.later_draft.record(size, 1e-6)
    chosen = [policy.lengths([own, row]) for _ in range(REST)]
    assert chosen == [[3, 0]] * (REST - 1) + [[3, AUTO_MAX_DRAFTS]]


def test_the_first_step_of_its_kind_is_not_timed():
    """It finds the caches full of the other kind's weights."""
    policy = DraftPolicy(EngineConfig())
    for size, has_drafts in ((3, True), (3, True), (4, True), (1, False), (1, False), (1, False), (2, True)):
        policy.record_verifying(size, has_drafts, float(size))
    assert policy.costs.verify.recent == {3: ([3.0], 1), 4: ([4.0], 2), 1: ([1.0, 1.0], 4)}


def test_a_rest_is_timed_at_its_end():
    """Nothing before is of use when the next decision is made."""
    policy = policy_with(base=0.01, per_token=1.0, draft_base=0.0, per_draft=0.5)
    before, timed, rows = policy.costs.verify.count, [], [make_row(acceptance=0.9)]
    policy.had_drafts = False
    for _ in range(REST):
        assert policy.lengths(rows) == [0]
        policy.record_verifying(1, False, 1.0)
        timed.append(policy.costs.verify.count - before)
    assert timed == [0] * (REST - REST_TIMED - 1) + list(range(1, REST_TIMED + 2))


@pytest.mark.parametrize("slowdown", [1 / 1.6, 1.6])
def test_a_pace_that_changes_between_drafts_and_none_speaks_for_neither(slowdown):
    """Steps with drafts are seen before the machine changes its pace by 60 percent, most of those without after it."""
    policy = DraftPolicy(EngineConfig())
    policy.had_drafts = True
    for _ in range(6):
        policy.record_verifying(3, True, 3.0)
    for pace in [1.0] * 4 + [slowdown] * 20:
        policy.record_verifying(1, False, pace)
    policy.num_drafting = 2
    policy.record_proposing([2], 0.5 * slowdown, [0.25 * slowdown])
    assert policy.costs.verify.expected(3) / policy.costs.verify.expected(1) == pytest.approx(3.0, rel=0.15)
    for draft in (policy.costs.first_draft, policy.costs.later_draft):
        assert draft.expected(1) / policy.costs.verify.expected(1) == pytest.approx(0.25, rel=0.15)
    assert policy.pace.slowness == pytest.approx(slowdown, rel=0.15)


def test_drafts_are_timed_by_forward():
    """The first, for four rows, takes all that the others, for two rows and for one, do not."""
    policy = DraftPolicy(EngineConfig(), num_drafting=2)
    for _ in range(3):
        policy.record_proposing([2, 1, 0, 1, 3], 1.0, [0.25, 0.125])
    assert policy.costs.first_draft.recent == {4: ([0.625] * 3, 3)}
    assert policy.costs.later_draft.recent == {2: ([0.25] * 3, 5), 1: ([0.125] * 3, 6)}
    policy.num_drafting = 1
    policy.record_proposing([2, 1, 0, 1, 3], 9.0, [0.25, 0.125])
    assert policy.costs.first_draft.count == 3 and policy.costs.later_draft.count == 6, "the first after a pause"


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
