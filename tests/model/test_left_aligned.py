"""The `left_aligned` layout: rows end at one shared column, dead prefixes are masked and do not accumulate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import ENGINE, TIGHT_ENGINE, TINY, Harness, alone, random_ids, random_model, relative_difference

from polytempo.cache.layout import Segment, StateShape
from polytempo.cache.window import LeftAlignedLayout, RingLayout, window_layout
from polytempo.errors import InvariantError

pytestmark = pytest.mark.twin  # the kernels know the ring without a caller's mask; in torch all of it is compared

LEFT = replace(ENGINE, kv_layout="left_aligned")
TIGHT_LEFT = replace(TIGHT_ENGINE, kv_layout="left_aligned")
LENGTHS = (150, 131, 62, 9)


@pytest.fixture(scope="module")
def model():
    return random_model(seed=3)


@pytest.fixture(scope="module")
def streams():
    return [random_ids(length + 40, seed=length) for length in LENGTHS]


def layout_of(engine=TIGHT_LEFT) -> LeftAlignedLayout:
    layout = window_layout(StateShape.build(TINY, engine), engine.max_rows)
    assert isinstance(layout, LeftAlignedLayout)
    return layout


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_a_row_alone_has_no_lead_and_equals_ring_to_the_bit(model, streams, chunk):
    harness = Harness(model, TIGHT_LEFT)
    assert torch.equal(harness.prefill(streams[0], [chunk]), Harness(model, TIGHT_ENGINE).prefill(streams[0], [chunk]))
    assert harness.store.target_windows.num_copies > 1, "the capacity never forced a copy"


def step(harness: Harness, streams, kv_lens: list[int], counts: list[int]) -> list[torch.Tensor]:
    """Feed every row its next count tokens; logits of each row."""
    segments = [
        Segment(slot, kv_len, ids[kv_len : kv_len + count])
        for slot, (ids, kv_len, count) in enumerate(zip(streams, kv_lens, counts, strict=True))
    ]
    return harness.logits(*segments)


def ragged_run(harness: Harness, streams, num_steps: int = 12, fed: int = 4):
    """Prefill rows of LENGTHS, then verify `fed` tokens and keep some of them, each row by its own count."""
    longest = max(LENGTHS)
    for start in range(0, longest, 8):
        rows = [slot for slot, length in enumerate(LENGTHS) if start < length]
        harness.streams(*(Segment(slot, start, streams[slot][start : min(start + 8, LENGTHS[slot])]) for slot in rows))
    kv_lens, seen, lens = list(LENGTHS), [[] for _ in LENGTHS], []
    for number in range(num_steps):
        logits = step(harness, streams, kv_lens, [fed] * len(kv_lens))
        for slot, row in enumerate(logits):
            keep = (1, 3, 2, 4)[(number + slot) % 4]
            seen[slot].append((kv_lens[slot], row[:keep]))
            kv_lens[slot] += keep
        lens.append(list(kv_lens))
    return seen, lens


def test_ragged_rows_equal_each_alone(model, streams):
    harness = Harness(model, TIGHT_LEFT)
    seen, lens = ragged_run(harness, streams)
    advances = np.diff(np.array([LENGTHS, *lens]), axis=0)
    assert all(len(set(step)) > 1 for step in advances.tolist()), "rows advance alike: no realignment was needed"
    assert any((now % 4) != (lens[0][0] % 4) for now in lens[-1])
    for slot, ids in enumerate(streams):
        expected = alone(model, ids[: lens[-1][slot] + 4], LENGTHS[slot])
        for start, logits in seen[slot]:
            assert relative_difference(logits, expected[start : start + len(logits)]) < 1e-5


def test_the_order_of_reduction_depends_on_neighbours(model, streams):
    """Which is why it is only a baseline; a layout that hid this would not be left_aligned."""
    left, _ = ragged_run(Harness(model, TIGHT_LEFT), streams)
    ring, _ = ragged_run(Harness(model, TIGHT_ENGINE), streams)
    pairs = [pair for ours, theirs in zip(left, ring, strict=True) for pair in zip(ours, theirs, strict=True)]
    same = [torch.equal(a[1], b[1]) for a, b in pairs]
    assert not all(same)
    assert all(same[: len(left[0])]), "the longest row has no lead: its columns are its positions in both layouts"


def test_dead_and_stale_cells_take_no_weight(model, streams):
    """Everything outside the rows' windows is overwritten with large values before each step."""
    clean, dirty = Harness(model, TIGHT_LEFT), Harness(model, TIGHT_LEFT)
    expected, _ = ragged_run(clean, streams, num_steps=6)
    original = dirty.streams

    def poisoned(*segments):
        layout = dirty.store.target_windows
        for segment in segments:
            positions = np.arange(layout.num_cells) + layout.starts[segment.slot]
            is_dead = (positions >= segment.start) | (positions < segment.start - TINY.sliding_window + 1)
            for layer in dirty.store.layers:
                layer.window[segment.slot, torch.from_numpy(np.flatnonzero(is_dead))] = 1e4
        return original(*segments)

    dirty.streams = poisoned
    got, _ = ragged_run(dirty, streams, num_steps=6)
    for ours, theirs in zip(got, expected, strict=True):
        assert all(torch.equal(a[1], b[1]) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("num_steps", [6, 12])
def test_dead_prefix_does_not_accumulate(model, streams, num_steps):
    harness = Harness(model, TIGHT_LEFT)
    _, lens = ragged_run(harness, streams, num_steps)
    view = harness.view([Segment(slot, kv_len, [5]) for slot, kv_len in enumerate(lens[-1])])
    assert int(view.leads.max()) == max(lens[-1]) - min(lens[-1]) and int(view.leads.min()) == 0
    assert len(set(view.leads.tolist())) == len(LENGTHS), "rows share a lead"


def test_realigning_copies_only_when_the_capacity_forces_it(model, streams):
    harness = Harness(model, TIGHT_LEFT)
    layout = harness.store.target_windows
    ragged_run(harness, streams, num_steps=0)
    before, starts = layout.num_copies, layout.starts.copy()
    kv_lens = list(LENGTHS)
    for number in range(12):
        for slot in range(len(kv_lens)):
            kv_lens[slot] += 1 + (slot + number) % 3
        forced = [kv_len + 1 - starts[slot] > layout.num_cells for slot, kv_len in enumerate(kv_lens)]
        harness.view([Segment(slot, kv_len, [5]) for slot, kv_len in enumerate(kv_lens)])
        assert (layout.starts[:4] != starts[:4]).tolist() == forced
        starts = layout.starts.copy()
    assert 0 < layout.num_copies - before < 12


def test_named_refusals():
    layout = layout_of()
    assert layout.leads(np.array([7, 4, 9]), 9, 3).tolist() == [2, 5, 0]
    with pytest.raises(InvariantError, match=r"row 2 ends at 9, ahead of the shared end column 8"):
        layout.leads(np.array([7, 4, 9]), 8, 3)
    with pytest.raises(InvariantError, match=r"no row is at the shared end column 12; the longest ends at 9"):
        layout.leads(np.array([7, 4, 9]), 12, 3)
    for wrong in ([7, 9], [7, 4, 9, 9]):
        with pytest.raises(InvariantError, match=rf"position vector has {len(wrong)} entries; 3 rows need 3"):
            layout.leads(np.array(wrong), 9, 3)


def test_going_back_before_what_is_kept_is_refused(model, streams):
    harness = Harness(model, TIGHT_LEFT)
    harness.prefill(streams[0], [8])
    layout = harness.store.target_windows
    oldest = int(layout.starts[0]) + TINY.sliding_window - 1
    assert oldest > 20
    harness.view([Segment(0, oldest, [5])])
    with pytest.raises(InvariantError, match=rf"goes back to position {oldest - 1}, but its raw keys start at"):
        harness.view([Segment(0, oldest - 1, [5])])


def test_a_cleared_slot_starts_at_0(model, streams):
    harness = Harness(model, TIGHT_LEFT)
    harness.prefill(streams[0], [8])
    assert harness.store.target_windows.starts[0] > 0
    harness.store.clear(0)
    expected = Harness(model, TIGHT_LEFT).prefill(streams[3], [8])
    assert torch.equal(harness.prefill(streams[3], [8]), expected)


def test_a_rewind_of_a_whole_chunk_right_after_a_copy(model, streams):
    """The copy keeps what the widest rewind can reopen: the positions before the rejected ones are all still there."""
    harness, ids = Harness(model, TIGHT_LEFT), streams[0]
    layout, position = harness.store.target_windows, 0
    while layout.num_copies < 2:
        before = layout.num_copies
        harness.logits(Segment(0, position, ids[position : position + 8]))
        position += 8
    assert layout.num_copies == before + 1
    again = harness.logits(Segment(0, position - 8, ids[position - 8 : position]))[0]
    assert torch.equal(again, Harness(model, LEFT).prefill(ids[:position], [8])[-8:])


def test_capacity_and_layout_choice():
    shape = StateShape.build(TINY, TIGHT_LEFT)
    kept = TINY.sliding_window - 1 + TIGHT_LEFT.max_chunk
    assert (shape.window_cells, shape.kept_cells) == (2 * kept + TIGHT_LEFT.max_chunk, kept)
    assert isinstance(window_layout(StateShape.build(TINY, TIGHT_ENGINE), 2), RingLayout)


def test_mtp_block_at_left_aligned(model, streams):
    """Drafts beside longer rows equal the drafts of each row alone."""
    harness = Harness(model, TIGHT_LEFT)
    target = Harness(model, LEFT)
    outputs = [target.streams(Segment(slot, 0, streams[slot][:80]))[0] for slot in range(2)]
    starts, got = (62, 80), {}
    for start in range(0, 80, 5):
        segments, inputs = [], []
        for slot in range(2):
            end = min(start + 5, starts[slot])
            if start < end:
                segments.append(Segment(slot, start, streams[slot][start + 1 : end + 1]))
                inputs.append(outputs[slot][start:end])
        result = harness.mtp(torch.cat(inputs), *segments).split([len(s.token_ids) for s in segments])
        for segment, part in zip(segments, result, strict=True):
            got.setdefault(segment.slot, []).append(part)
    pair = [Segment(slot, starts[slot] - 1, [streams[slot][starts[slot]]]) for slot in range(2)]
    assert harness.store.mtp_windows.num_copies > 0 == harness.store.target_windows.num_copies
    together = harness.mtp(torch.cat([outputs[slot][starts[slot] - 1 : starts[slot]] for slot in range(2)]), *pair)
    for slot in range(2):
        single = Harness(model, LEFT)
        ids = streams[slot][1 : starts[slot] + 1]
        expected = single.mtp(outputs[slot][: starts[slot]], Segment(0, 0, ids))
        assert relative_difference(torch.cat(got[slot]), expected) < 1e-5
        assert relative_difference(together[slot], expected[-1]) < 1e-5
