"""Rows at one position share positions and mask; the results are those of rows that do not."""

from __future__ import annotations

import torch
from ragged_support import each_dtype, model_of
from support import ENGINE, Harness, random_ids

from polytempo.cache.layout import Segment
from polytempo.cache.view import BatchView
from polytempo.cache.window import RingLayout


def groups_of(*segments: Segment):
    """Tile groups of a forward at layout ring."""
    return BatchView.build(segments, RingLayout(16, 64), (4, 128)).groups


def test_a_uniform_batch_holds_positions_and_mask_once():
    """Which path ran is asserted, since the values agree (see the next test)."""
    for count in (1, 5):
        (group,) = groups_of(*(Segment(slot, 70, [slot] * count) for slot in range(7)))
        assert group.positions.shape[0] == group.key_positions.shape[0] == group.window_mask.shape[0] == 1
        assert group.token_idx.shape[0] == group.key_cells.shape[0] == 7
    (alone,) = groups_of(Segment(3, 70, [5]))
    assert alone.positions.shape[0] == 1
    (ragged,) = groups_of(*(Segment(slot, 70 + (slot == 6), [slot]) for slot in range(7)))
    assert ragged.positions.shape[0] == ragged.window_mask.shape[0] == 7
    (same_start,) = groups_of(*(Segment(slot, 70, [slot] * (3 + slot % 2)) for slot in range(4)))
    assert same_start.positions.shape[0] == 4, "rows that bring different counts share no positions"


@each_dtype
def test_uniform_and_ragged_paths_agree_to_the_bit(dtype):
    """Three rows at one position, then the same beside a fourth elsewhere."""
    model = model_of(dtype)
    ids = [random_ids(140, seed=slot) for slot in range(4)]
    results = []
    for with_fourth in (False, True):
        harness = Harness(model, ENGINE)
        for slot in range(4):
            harness.streams(Segment(slot, 0, ids[slot][: 131 - 10 * (slot == 3)]))
        segments = [Segment(slot, 131, ids[slot][131:135]) for slot in range(3)]
        segments += [Segment(3, 121, ids[3][121:124])] * with_fourth
        (group,) = harness.view(segments).groups
        assert group.positions.shape[0] == (4 if with_fourth else 1)
        results.append(torch.cat(harness.logits(*segments)[:3]))
    assert torch.equal(*results)
