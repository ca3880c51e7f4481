"""What a step costs, from measurements that are noisy and of few sizes."""

import pytest

from polytempo.engine.step_cost import MEDIAN_OVER, MOST_SIZES, MOST_SURPRISE, PACE_GAIN, LinearCost, Pace


def test_linear_cost_recovers_a_line_and_forgets():
    cost = LinearCost()
    assert cost.line == (0.0, 0.0) and cost.expected(3) == 0.0
    for size in (1, 4, 9, 2, 7):
        cost.record(size, 0.5 + 0.25 * size)
    assert cost.line == pytest.approx((0.5, 0.25))
    for _ in range(800):
        for size in (1, 5):
            cost.record(size, 2.0 + 0.1 * size)
    assert cost.line == pytest.approx((2.0, 0.1), rel=1e-2)
    constant = LinearCost()
    for _ in range(5):
        constant.record(3, 0.9)
    assert constant.line == pytest.approx((0.9, 0.0))
    noisy = LinearCost()
    for size, seconds in ((1, 9.0), (1, 2.0), (8, 1.0)):
        noisy.record(size, seconds)
    assert noisy.line[1] == 0.0, "more tokens never cost less"


def test_a_batch_that_settles_on_one_size_does_not_forget_what_a_token_costs():
    """With one size left, all of a step would look like base, and more drafts like a present."""
    cost = LinearCost()
    for size in (1, 1, 2, 3) * 2:
        cost.record(size, 1.0 + 0.5 * size)
    for _ in range(500):
        cost.record(6, 4.0)
    assert cost.line == pytest.approx((1.0, 0.5), rel=1e-2)


def test_a_size_costs_what_its_last_measurements_say():
    """However long it took before: a machine that has become faster is believed after MEDIAN_OVER steps."""
    cost = LinearCost()
    for seconds, count in ((9.0, 100), (2.0, MEDIAN_OVER)):
        for _ in range(count):
            cost.record(3, seconds)
    assert cost.line == (2.0, 0.0)


def test_a_pace_is_followed_but_not_a_moment():
    pace = Pace()
    for _ in range(12):
        pace.record(1.5, 1.0)
    assert pace.slowness == pytest.approx(1.5, rel=0.01)
    pace.record(100.0, 1.0)
    assert 1.5 < pace.slowness < 1.5 * MOST_SURPRISE**PACE_GAIN * 1.01 < 1.62, "something else ran"
    held = pace.slowness
    for seconds, expected in ((1.0, 0.0), (0.0, 1.0)):
        pace.record(seconds, expected)
    assert pace.slowness == held, "nothing is known, or nothing was measured"


def test_what_a_size_is_expected_to_take():
    """The line, and what its own measurements say beyond it; nothing of sizes that were never seen."""
    cost = LinearCost()
    for size, seconds in ((1, 1.0), (2, 2.0), (4, 4.0), (8, 20.0)):
        for _ in range(MEDIAN_OVER):
            cost.record(size, seconds)
    base, slope = cost.line
    assert abs(cost.expected(8) - 20.0) < abs(base + slope * 8 - 20.0) and cost.expected(3) == 0.0


def test_sizes_are_remembered_in_bounds():
    cost = LinearCost()
    for size in range(1000):
        cost.record(size, 1.0 + size)
    assert len(cost.recent) <= MOST_SIZES and cost.line == pytest.approx((1.0, 1.0), rel=1e-3)
