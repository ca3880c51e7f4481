"""Which drafts pay in one step: rows' rooms and acceptance, and what cost models say."""

import random

import pytest
from draft_support import make_row, policy_with

from polytempo.engine.draft_length import Acceptance, DraftPolicy
from polytempo.engine.draft_phases import LEAST_GAIN, LOOK_FIRST, TRIAL_LOSS, TRIAL_STEPS, Pause, Paying
from polytempo.engine.draft_plan import Costs, PlainStep, best_plan
from polytempo.engine.step_cost import MEDIAN_OVER, LinearCost
from polytempo.engine_config import AUTO_MAX_DRAFTS, EngineConfig


def test_a_size_that_was_seen_often_and_lately_is_believed_over_the_line():
    """Costs are concave: two drafts pay where the line through one and five says that they do not."""
    policy = policy_with(base=1.0, per_token=1.0, draft_base=0.01, per_draft=0.0)
    policy.acceptance = Acceptance(10.0, 8.0)
    cost = policy.costs.verify = LinearCost()
    cost.record(1, 99.0)  # cold
    for _ in range(MEDIAN_OVER):
        for size, seconds in {1: 1.0, 2: 1.9, 3: 2.2, 6: 5.0}.items():
            cost.record(size, seconds)
    base, slope = cost.line
    assert 2.44 / (base + 3 * slope + 0.02) < 1.0 < 2.44 / 2.22
    assert base + 3 * slope + cost.excess[3] == pytest.approx(2.2, abs=0.1)
    row = make_row(acceptance=0.8)
    assert policy.lengths([row]) == [2]
    for _ in range(500):
        cost.record(1, 1.0)
    assert abs(cost.line[1] - slope) < 0.02 and abs(cost.excess[3]) < 0.02, "long ago"
    assert policy.lengths([row])[0] < 2


def test_auto_drafts_where_it_pays():
    """Cheap tokens and likely drafts: long runs. Dear tokens or unlikely drafts: none."""
    eager = policy_with(base=1.0, per_token=0.001, draft_base=0.0, per_draft=0.001)
    assert eager.lengths([make_row(acceptance=0.95)]) == [AUTO_MAX_DRAFTS]
    dear = policy_with(base=0.01, per_token=1.0, draft_base=0.0, per_draft=0.5)
    assert dear.lengths([make_row(acceptance=0.95)]) == [0]
    middle = policy_with(base=1.0, per_token=0.1, draft_base=0.05, per_draft=0.1)
    assert middle.lengths([make_row(acceptance=0.02)]) == [0]
    slow_start = policy_with(base=1.0, per_token=0.01, draft_base=5.0, per_draft=0.01)
    assert slow_start.lengths([make_row(acceptance=0.95)]) == [0], "what a forward of the MTP block costs besides rows"


def test_auto_keeps_to_every_rows_room():
    """Rows alike that have room for all drafts, one and none: what one has no room for goes to nobody."""
    policy = policy_with(base=1.0, per_token=0.001, draft_base=0.0, per_draft=0.001)
    rows = [make_row(acceptance=0.95, max_tokens=limit) for limit in (5, 100, 4)]
    assert policy.lengths(rows) == [1, AUTO_MAX_DRAFTS, 0]


def test_a_second_draft_costs_what_the_first_one_did_until_it_is_timed():
    policy = DraftPolicy(EngineConfig())
    for size in (1, 1, 2, 3) * 2:
        policy.costs.verify.record(size, 1.0)
    for _ in range(2):
        policy.costs.first_draft.record(1, 0.5)
    rates = [sum(0.9**k for k in range(count + 1)) / (1 + 0.5 * count) for count in range(AUTO_MAX_DRAFTS + 1)]
    best = rates.index(max(rates))
    assert 0 < best < AUTO_MAX_DRAFTS and policy.lengths([make_row(acceptance=0.9)]) == [best]


def test_further_drafts_cost_what_they_took():
    """The first forward of a step pays for all around it: what it takes says nothing of a second one."""
    for later, expected in ((0.05, AUTO_MAX_DRAFTS), (0.9, 1)):
        policy = policy_with(base=1.0, per_token=0.001, draft_base=0.5, per_draft=0.001)
        policy.costs.later_draft = LinearCost()
        for size in (1, 2):
            policy.costs.later_draft.record(size, later)
        assert policy.lengths([make_row(acceptance=0.9)]) == [expected]
    dear_first = policy_with(base=1.0, per_token=0.001, draft_base=0.05, per_draft=0.25)
    dear_first.costs.later_draft = LinearCost()
    for size in range(1, 9):
        dear_first.costs.later_draft.record(size, 0.05 + 0.01 * size)
    assert dear_first.lengths([make_row(acceptance=0.9) for _ in range(4)]) == [AUTO_MAX_DRAFTS] * 4
    fixed = PlainStep.of(1, [(0.5, 3), (0.5, 0)], policy.costs)
    assert fixed.seconds(1) == fixed.seconds(3) == pytest.approx(1.0 + 0.001 * 6 + 0.501 + 2 * 0.9)
    assert fixed.seconds(4) == pytest.approx(fixed.seconds(3) + 0.9)


def test_a_proposer_that_costs_more_than_all_drafts_gain_is_not_asked():
    """A sure draft gives one token more: not for more than the time of a step, but for less."""
    for draft_base, expected in ((1.02, 0), (0.95, AUTO_MAX_DRAFTS)):
        policy = policy_with(base=1.0, per_token=0.001, draft_base=draft_base, per_draft=0.001)
        policy.acceptance = Acceptance(1000.0, 1000.0)
        assert policy.lengths([make_row(acceptance=1.0)]) == [expected]


def test_every_further_draft_takes_a_forward():
    """One row alone drafts as deep as its forwards pay; among rows that go as deep anyway, it goes with them."""
    policy = policy_with(base=1.0, per_token=0.001, draft_base=0.3, per_draft=0.001)
    assert policy.lengths([make_row(acceptance=0.5)]) == [1]
    assert policy.lengths([make_row(acceptance=chance) for chance in (0.9, 0.5) for _ in range(8)]) == [2] * 16


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
                propose = draft_base * max(lengths) + per_draft * drafts
                return tokens / (base + per_token * (num_rows + drafts) + propose)

            policy.pause = Pause()  # decide now
            chosen = rate(policy.lengths(rows))
            assert chosen >= max(rate([k] * num_rows) for k in range(AUTO_MAX_DRAFTS + 1)) * 0.999


def test_a_loss_is_that_of_a_draft_for_every_row():
    """One draft among 64 rows loses next to nothing, whatever it costs: that would keep every wait short."""
    policy = policy_with(base=0.0, per_token=1.0, draft_base=0.0, per_draft=0.1)
    policy.acceptance = Acceptance(10.0, 8.0)
    rows = [make_row(acceptance=0.8) for _ in range(63)] + [make_row(acceptance=0.8, max_tokens=4)]
    assert policy.lengths(rows) == [0] * 64
    room = [1] * 63 + [0]
    plan = best_plan([0.8] * 64, room, [], policy.costs, least_gain=0.0)
    assert plan.lengths == [0] * 64
    assert plan.loss == pytest.approx(1 - (64 + 63 * 0.8) * 64 / (64 * (64 + 63 * 1.1)))


def test_a_batch_begins_to_draft_for_a_clear_gain_and_goes_on_for_any():
    """One draft in each row is accepted eight times in ten, and costs 0.78 or 0.64 of a step."""
    rows = [make_row(acceptance=0.8, max_tokens=5) for _ in range(4)]
    for per_draft, begins in ((0.195, False), (0.16, True)):
        policy = policy_with(base=1.0, per_token=0.0, draft_base=0.0, per_draft=per_draft)
        policy.acceptance = Acceptance(10.0, 8.0)
        gain = 1.8 / (1 + 4 * per_draft)
        assert 1 < gain and (gain > 1 + LEAST_GAIN) == begins
        assert policy.lengths(rows) == [int(begins)] * 4 and policy.paying.num_steps == begins
        policy.pause, policy.paying = Pause(), Paying(num_steps=1)
        assert policy.lengths(rows) == [1] * 4 and policy.paying.num_steps == 2


def test_drafts_that_were_just_tried_go_on_for_a_small_loss():
    """One draft in each row is accepted eight times in ten; one forward for all of them costs 0.82 or 0.92 steps."""
    for draft_base, goes_on in ((0.6, True), (0.7, False)):
        policy = policy_with(base=1.0, per_token=0.0, draft_base=draft_base, per_draft=0.055)
        policy.acceptance = Acceptance(10.0, 8.0)
        rows = [make_row(acceptance=0.8, max_tokens=5) for _ in range(4)]
        loss = 1 - 1.8 / (1 + draft_base + 4 * 0.055)
        assert 0 < loss and (loss < TRIAL_LOSS) == goes_on
        policy.pause, policy.num_trials = Pause(), TRIAL_STEPS + 1
        assert policy.lengths(rows) == [1, 1, 0, 0] and policy.num_trials == TRIAL_STEPS, "two rows try again"
        followed = [policy.lengths(rows) for _ in range(TRIAL_STEPS + 1)]
        num_drafting = TRIAL_STEPS if goes_on else 0
        looks = [step for step in range(num_drafting) if step in (LOOK_FIRST, LOOK_FIRST + 1)]
        expected = [[0 if step in looks else int(step < num_drafting)] * 4 for step in range(TRIAL_STEPS + 1)]
        assert followed == expected and policy.num_trials == 0
    explored = DraftPolicy(EngineConfig())
    explored.lengths(rows)
    assert explored.num_trials == TRIAL_STEPS


def test_rows_in_their_prompt_weigh_nothing():
    """They gain no token in the next step, whatever it costs."""
    policy = policy_with(base=1.0, per_token=0.2, draft_base=0.05, per_draft=0.05)
    row, reading = make_row(acceptance=0.8), make_row()
    reading.kv_len, reading.output_token_ids = 3, []
    (alone,) = policy.lengths([row])
    assert alone > 1 and not reading.is_decoding
    assert policy.lengths([row, reading, reading]) == [alone, 0, 0]


def test_what_rows_of_their_own_length_bring_is_counted():
    """Their drafts take the forwards anyway, and the step is dearer: one more draft pays that alone would not."""
    policy = policy_with(base=1.0, per_token=0.1, draft_base=0.5, per_draft=0.05)
    row, own = make_row(acceptance=0.5), make_row(acceptance=0.5, draft_len=2)
    policy.acceptance = Acceptance(10.0, 5.0)
    assert policy.lengths([row]) == [0]
    policy.pause = Pause()
    assert policy.lengths([row, own]) == [2, 2]
    # Nine rows' 17 tokens are a step of 2 s that gives 13 tokens: 0.9 tokens more are worth 0.1 s more.
    policy = policy_with(base=0.2, per_token=0.1, draft_base=0.1, per_draft=0.0)
    policy.acceptance, policy.paying = Acceptance(10.0, 5.0), Paying(num_steps=1)
    owns = [make_row(acceptance=0.5, draft_len=1) for _ in range(8)]
    assert policy.lengths([make_row(acceptance=0.9, max_tokens=5), *owns]) == [1] * 9
    assert policy.lengths([make_row(acceptance=0.5, max_tokens=5), *owns]) == [0] + [1] * 8, "half a token is not"


def test_a_step_that_was_held_up_decides_nothing():
    """Costs are medians: one step among neighbours' noise is no reason to stop drafting, nor to start."""
    policy = policy_with(base=1.0, per_token=0.001, draft_base=0.0, per_draft=0.001)
    for size in range(1, 9):
        policy.costs.verify.record(size, 1.0 + 0.001 * size)
    for size in (1, 5):
        policy.costs.verify.record(size, 50.0)
    assert policy.costs.verify.line == pytest.approx((1.0, 0.001))
    assert policy.lengths([make_row(acceptance=0.95)]) == [AUTO_MAX_DRAFTS]


def test_rows_pay_together():
    """One row's draft loses to the forward that it takes; all rows' drafts pay for it."""
    policy = policy_with(base=1.0, per_token=0.1, draft_base=0.3, per_draft=0.05)
    assert 8.98 / (1.8 + 0.3 + 0.15) < 8 / 1.8 < 8 * 1.98 / (1.8 + 0.3 + 8 * 0.15)
    assert min(policy.lengths([make_row(acceptance=0.98) for _ in range(8)])) > 0


def test_new_rows_are_taken_for_the_average():
    """What other rows' drafts came to is believed of a row that has not drafted yet."""
    for accepted, expected in ((1, AUTO_MAX_DRAFTS), (0, 0)):
        policy = policy_with(base=1.0, per_token=0.2, draft_base=0.05, per_draft=0.2)
        other = make_row()
        for _ in range(100):
            policy.record(other, 1, accepted)
            policy.record(other, 0, 0)
        assert other.stats.num_drafted == 100 and other.stats.num_accepted == 100 * accepted
        assert policy.lengths([make_row()]) == [expected], accepted
        for _ in range(1000):
            policy.record(other, 0, 0)
        policy.record(other, 1, 1 - accepted)
        policy.pause = Pause()  # decide now
        assert policy.lengths([make_row()]) == [expected], "one draft after a long pause outweighs a hundred"


def plan_by_definition(chances, room, fixed, costs, least_gain):
    """`best_plan`'s lengths with each plan weighed by itself: so many forwards, so many of their likeliest drafts."""
    step = PlainStep.of(len(room), fixed, costs)
    best, chosen = step.tokens / step.plain_seconds * (1 + least_gain), []
    for num_forwards in range(1, max(room) + 1):
        drafts = [(place, k) for place, most in enumerate(room) for k in range(min(most, num_forwards))]
        able = sorted(drafts, key=lambda draft: (-(chances[draft[0]] ** (draft[1] + 1)), *draft))
        for num_drafts in range(1, len(able) + 1):
            tokens, by_line = step.tokens, step.seconds(num_forwards)
            for place, k in able[:num_drafts]:
                tokens += chances[place] ** (k + 1)
                by_line += step.per_later if k else step.per_first
            seconds = by_line + costs.verify.excess.get(step.num_fed + num_drafts, 0.0)
            if tokens > best * seconds:
                best, chosen = tokens / seconds, able[:num_drafts]
    return [sum(1 for draft in chosen if draft[0] == place) for place in range(len(room))]


def random_costs(rng):
    """Costs after a few noisy steps, some of them without a further forward, some free of this or that."""
    base, per_token, forward, per_draft = (rng.choice([0.0, rng.random(), rng.random()]) for _ in range(4))
    costs = Costs()
    for _ in range(rng.randrange(1, 30)):
        size, num_rows = rng.randrange(1, 40), rng.randrange(1, 9)
        costs.verify.record(size, (base + 0.1 + 0.1 * per_token * size) * rng.lognormvariate(0, 0.1))
        costs.first_draft.record(num_rows, 0.3 * forward + 0.1 * per_draft * num_rows * rng.lognormvariate(0, 0.1))
        if rng.random() < 0.8:
            costs.later_draft.record(num_rows, 0.1 * forward + 0.1 * per_draft * num_rows)
    return costs


def test_every_plan_is_the_one_that_its_definition_gives():
    """Rows of one chance, rows without room, rows of fixed lengths, sizes that cost more or less than the line says."""
    rng, seen = random.Random(7), []
    for _ in range(3000):
        num_rows = rng.choice([1, 1, 2, 3, 5, 8])
        some = [rng.choice([0.0, 0.5, 1.0, rng.random(), rng.random()]) for _ in range(rng.randrange(1, num_rows + 1))]
        chances = [rng.choice(some) for _ in range(num_rows)]
        room = [rng.choice([0, 1, 2, 3, 5, 5]) for _ in range(num_rows)]
        room[rng.randrange(num_rows)] = rng.randrange(1, 6)
        fixed = [(rng.random(), rng.randrange(4)) for _ in range(rng.choice([0, 0, 1, 3]))]
        costs, least_gain = random_costs(rng), rng.choice([-0.03, 0.0, 0.03])
        lengths = best_plan(chances, room, fixed, costs, least_gain).lengths
        assert lengths == plan_by_definition(chances, room, fixed, costs, least_gain), (chances, room, fixed)
        seen.append((sum(lengths), max(lengths) - min(lengths), sum(lengths) == sum(room)))
    assert sum(1 for total, _, _ in seen if not total) > 500, "often none pays"
    assert sum(1 for total, spread, is_all in seen if total and spread and not is_all) > 500, "often some do"
