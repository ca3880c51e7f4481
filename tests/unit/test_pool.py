"""The pool of entry blocks: who holds what, under a budget."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_layout import ENGINE, MODEL

from polytempo.cache.layout import BLOCK, StateShape
from polytempo.cache.pool import NULL_BLOCK, EntryPool, num_blocks
from polytempo.errors import CapacityError, ConfigError, InvariantError

SHAPE = StateShape.build(MODEL, ENGINE)
LIMIT = ENGINE.max_model_len


def make_pool(num_slots: int = 4, budget: int | None = None) -> EntryPool:
    memory = None if budget is None else budget + num_slots * SHAPE.slot_bytes(2)
    return EntryPool(SHAPE, num_slots, 2, memory)


def one_row() -> int:
    """Bytes that one row of max_model_len needs, null blocks included."""
    pool = make_pool(1)
    pool.reserve(0, LIMIT)
    return pool.num_bytes


@pytest.mark.parametrize("ratio", [4, 128])
def test_blocks_are_taken_when_their_first_entry_is_complete(ratio):
    span = ratio * BLOCK
    lengths = (0, ratio - 1, ratio, span, span + ratio - 1, span + ratio)
    assert [num_blocks(length, ratio) for length in lengths] == [0, 0, 1, 1, 1, 2]


def test_block_bytes_count_every_layer_of_the_ratio():
    pool = make_pool()
    layers = {4: MODEL.compress_ratios.count(4), 128: MODEL.compress_ratios.count(128)}
    widths = {4: MODEL.head_dim + MODEL.index_head_dim, 128: MODEL.head_dim}
    expected = {ratio: 2 * BLOCK * layers[ratio] * widths[ratio] for ratio in (4, 128)}
    assert {ratio: part.block_bytes for ratio, part in pool.ratios.items()} == expected


def test_tables_fill_in_order_and_are_given_back():
    pool = make_pool()
    pool.reserve(1, 300)
    pool.reserve(0, 40)
    pool.reserve(1, 700)
    assert pool.ratios[4].table[:2, :4].tolist() == [[3, 0, 0, 0], [1, 2, 4, 0]]
    pool.check()
    pool.release(1)
    assert pool.ratios[4].held(1) == 0 and sorted(pool.ratios[4].free)[:3] == [1, 2, 4]
    pool.reserve(2, 10)
    assert pool.ratios[4].table[2, 0] == 1, "the lowest free block goes first"
    pool.check()
    pool.release(0)
    pool.release(2)
    before = pool.num_bytes
    pool.shrink()
    assert pool.num_bytes == sum(p.block_bytes for p in pool.ratios.values()) < before


def test_shrinking_waits_for_the_last_row():
    pool = make_pool()
    pool.reserve(1, 300)
    size = pool.num_bytes
    pool.shrink()
    assert pool.num_bytes == size


def test_a_budget_below_one_row_is_refused():
    make_pool(budget=one_row())
    needed = one_row() + 4 * SHAPE.slot_bytes(2)
    with pytest.raises(ConfigError, match=f"'memory' is {needed - 1} bytes; .* at least {needed}; or lower max_rows"):
        make_pool(budget=one_row() - 1)


def test_reserving_past_the_budget_is_refused_and_takes_nothing():
    pool = make_pool(budget=one_row())
    pool.reserve(0, LIMIT // 2)
    before = [p.table.copy() for p in pool.ratios.values()]
    with pytest.raises(CapacityError, match="slot 1 needs blocks for"):
        pool.reserve(1, LIMIT)
    assert all((a == p.table).all() for a, p in zip(before, pool.ratios.values(), strict=True))
    pool.check()


def test_most_tokens_is_the_most():
    """By definition: that many fit, one more does not."""
    pool = make_pool(budget=one_row())
    pool.reserve(0, LIMIT * 2 // 3)
    for wanted in (1, 3, 200, LIMIT // 3, LIMIT):
        most = pool.most_tokens(1, wanted)
        assert pool.fits({1: most}) and (most == wanted or not pool.fits({1: most + 1}))
    assert 0 < pool.most_tokens(1, LIMIT) < LIMIT


def test_fits_counts_all_slots_together():
    pool = make_pool(budget=one_row())
    half = LIMIT // 2 - 4 * BLOCK
    assert pool.fits({0: half}) and pool.fits({0: half, 1: half // 2})
    assert not pool.fits({slot: half for slot in range(4)})


def test_check_sees_a_gap_and_a_lost_block():
    pool = make_pool()
    pool.reserve(0, 600)
    table = pool.ratios[4].table
    table[0, [0, 2]], kept = (NULL_BLOCK, table[0, 0]), table[0].copy()
    with pytest.raises(InvariantError):
        pool.check()
    table[0] = kept
    pool.check()
    pool.ratios[4].free.append(1)
    with pytest.raises(InvariantError, match="ratio 4: blocks held"):
        pool.check()


@settings(max_examples=60, deadline=None)
@example([(0, 772), (2, 260), (3, 516), (2, 516), (1, 260)], 2.6875)  # ratio 4 grew into what ratio 128 needed
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, LIMIT)), max_size=40), st.floats(1.0, 3.0))
def test_any_history_keeps_the_books(history, share):
    pool = make_pool(budget=int(one_row() * share))
    lengths = [0] * 4
    for slot, num_tokens in history:
        if num_tokens < lengths[slot]:
            pool.release(slot)
            lengths[slot] = 0
        elif pool.fits({slot: num_tokens}):
            pool.reserve(slot, num_tokens)
            lengths[slot] = num_tokens
        pool.check()
        for ratio, part in pool.ratios.items():
            assert [part.held(s) for s in range(4)] == [num_blocks(n, ratio) for n in lengths]
            assert set(part.table[part.table != NULL_BLOCK].tolist()) <= set(np.arange(1, part.size).tolist())
