"""A row's logits do not depend on what else its state holds: stale cells, padding, wrong tokens, a former owner."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from ragged_support import each_dtype, model_of
from support import ENGINE, TIGHT_ENGINE, TINY, Harness, alone, poison, random_ids, slot_tensors, visible_cells
from torch import Tensor

from polytempo.cache.layout import Segment
from polytempo.model import ops

POISONED_LENGTHS = {0: 3, 1: 61, 3: 126, 4: 127, 5: 128, 6: 258}
"""Slots 2 and 7 stay empty; the rows stand at all residues of 4 and on both sides of 128."""


@functools.cache
def poisonable(dtype: torch.dtype) -> tuple[dict[int, list[int]], Harness]:
    """The rows' streams, and a state that holds POISONED_LENGTHS tokens of them."""
    harness = Harness(model_of(dtype), TIGHT_ENGINE)
    streams = {slot: random_ids(length + 12, seed=80 + slot) for slot, length in POISONED_LENGTHS.items()}
    for start in range(0, max(POISONED_LENGTHS.values()), 8):
        harness.logits(
            *(Segment(slot, start, streams[slot][start : min(start + 8, length)])
              for slot, length in POISONED_LENGTHS.items() if start < length)
        )  # fmt: skip
    return streams, harness


def continue_poisoned(dtype: torch.dtype, value: float | None, change=None) -> tuple[dict[int, Tensor], Harness]:
    """Poison what no row may see, then two forwards of unequal width; logits by slot, and the state after."""
    streams, prefilled = poisonable(dtype)
    harness = Harness(model_of(dtype), TIGHT_ENGINE)
    pairs = zip(slot_tensors(harness.store, writable=True), slot_tensors(prefilled.store), strict=True)
    for tensor, source in pairs:
        tensor.copy_(source)
    if value is not None:
        kept = visible_cells(TINY, harness.store, POISONED_LENGTHS)
        if change is not None:
            change(kept)
        poison(harness.store, kept, value)
    places, found = dict(POISONED_LENGTHS), {slot: [] for slot in POISONED_LENGTHS}
    for counts in ((1, 5, 2, 1, 4, 3), (2, 1, 3, 6, 1, 1)):
        segments = []
        for (slot, place), count in zip(places.items(), counts, strict=True):
            segments.append(Segment(slot, place, streams[slot][place : place + count]))
            places[slot] = place + count
        for segment, logits in zip(segments, harness.logits(*segments), strict=True):
            found[segment.slot].append(logits)
    return {slot: torch.cat(rows) for slot, rows in found.items()}, harness


def same_rows(ours: dict[int, Tensor], theirs: dict[int, Tensor]) -> dict[int, bool]:
    return {slot: torch.equal(ours[slot], logits) for slot, logits in theirs.items()}


@pytest.mark.parametrize(
    "dtype, value", [(torch.float32, 1e4), (torch.float32, 1e30), (torch.bfloat16, 1e4), (torch.bfloat16, 1e30)]
)
def test_cells_that_no_row_may_see_are_not_seen(dtype, value):
    """Unwritten and stale cells, other slots, and entry columns past the row's own count."""
    expected, _ = continue_poisoned(dtype, None)
    assert {length % 4 for length in POISONED_LENGTHS.values()} == {0, 1, 2, 3}
    assert all(same_rows(continue_poisoned(dtype, value)[0], expected).values())


def named_tensors(harness: Harness) -> list[tuple[int, str]]:
    """Layer and part of each of `slot_tensors(store)`, the MTP block left out."""
    names = []
    for layer_idx, ratio in enumerate(TINY.compress_ratios):
        parts = {0: (), 4: ("", "index "), 128: ("",)}[ratio]
        names += [(layer_idx, "window"), *((layer_idx, p + n) for p in parts for n in ("kv", "gate", "entries"))]
    assert len(names) == len(slot_tensors(harness.store)) - 1
    return names


def test_every_cell_that_a_row_sees_matters():
    """Guard of the test above: poisoning what one slot does see moves that slot, and no other."""
    expected, untouched = continue_poisoned(torch.float32, None)
    for tensor_idx, (layer_idx, name) in enumerate(named_tensors(untouched)):
        # Slot 3 (126 tokens) completes an entry of each ratio at once; slot 6 (258) has finished ones of each.
        slot = 6 if "entries" in name else 3

        def hide(kept, tensor_idx=tensor_idx, name=name, slot=slot):
            mask = kept[tensor_idx][slot]
            oldest = 126 - TINY.sliding_window + 1
            cells = mask.clone() if "entries" in name else [(oldest if name == "window" else 125) % len(mask)]
            assert mask[cells].all()
            mask[cells] = False

        found, harness = continue_poisoned(torch.float32, 3.0, hide)
        if name == "window" or "entries" in name:
            assert [s for s, is_same in same_rows(found, expected).items() if not is_same] == [slot], (layer_idx, name)
            continue
        ratio = TINY.compress_ratios[layer_idx]
        ours, theirs = (slot_tensors(h.store)[tensor_idx + (2 if "kv" in name else 1)] for h in (harness, untouched))
        same = [torch.equal(ours[s, : end // ratio], theirs[s, : end // ratio]) for s, end in ((3, 131), (5, 133))]
        assert same == [False, True], (layer_idx, name)


@pytest.mark.twin
@each_dtype
def test_padding_rows_are_never_read(dtype, monkeypatch):
    (expected, _), num_padded, original = continue_poisoned(dtype, None), [], ops.pad_rows

    def counting(x, rows):
        num_padded.append(rows > x.shape[-2])
        return original(x, rows)

    monkeypatch.setattr(ops, "pad_rows", counting)
    monkeypatch.setattr(ops, "PADDING_VALUE", float("nan"))
    found, _ = continue_poisoned(dtype, None)
    assert sum(num_padded) > 20, "nothing was padded"
    assert all(torch.isfinite(logits).all() for logits in found.values())
    assert all(same_rows(found, expected).values())


@each_dtype
def test_rewound_rows_forget_the_wrong_tokens(dtype):
    """1 to 8 wrong tokens from each residue, over both entry boundaries, then the right ones from the old position."""
    model = model_of(dtype)
    engine = replace(TIGHT_ENGINE, max_rows=64)
    lengths = (*range(60, 64), *range(124, 128)) if dtype == torch.float32 else range(124, 128)
    cases = [(length, count) for length in lengths for count in range(1, 9)]
    assert any(length + count > 128 for length, count in cases if length < 128)
    streams = [random_ids(length + 12, seed=300 + row_idx) for row_idx, (length, _) in enumerate(cases)]
    harness = Harness(model, engine)
    for step in range(0, 128, 8):
        segments = [
            Segment(slot, step, streams[slot][step : min(step + 8, length)])
            for slot, (length, _) in enumerate(cases)
            if step < length
        ]
        harness.logits(*segments)
    wrong = [[(token + 1) % TINY.vocab_size for token in streams[slot][cases[slot][0] :]] for slot in range(len(cases))]
    for slot, (_, count) in enumerate(cases):
        assert not any(a == b for a, b in zip(wrong[slot][:count], streams[slot][cases[slot][0] :], strict=False))
    before = [tensor.clone() for tensor in slot_tensors(harness.store)]
    for shift in (0, 1):  # Two rejected verifies in a row; the second is of another width.
        harness.logits(
            *(Segment(slot, length, wrong[slot][: (count - 1 + shift * 3) % 8 + 1])
              for slot, (length, count) in enumerate(cases))
        )  # fmt: skip
    moved = [not torch.equal(a, b) for a, b in zip(before, slot_tensors(harness.store), strict=True)]
    assert sum(moved) == len(moved) - 1, "the wrong tokens must touch everything but the MTP block's window"
    found: list[list[Tensor]] = [[] for _ in cases]
    for bounds in ((0, 3), (3, 4), (4, 12)):
        segments = [
            Segment(slot, length + bounds[0], streams[slot][length + bounds[0] : length + bounds[1]])
            for slot, (length, _) in enumerate(cases)
        ]
        for rows, logits in zip(found, harness.logits(*segments), strict=True):
            rows.append(logits)
    for slot, (length, count) in enumerate(cases):
        expected = Harness(model).prefill(streams[slot], [length + 12])[length:]
        assert torch.equal(torch.cat(found[slot]), expected), (length, count)


@pytest.mark.parametrize("cleared", (True, False))
def test_a_slot_serves_one_request_after_another(cleared):
    """The first request was fine, every later one on its slot was gibberish."""
    model = model_of(torch.float32)
    first, second = random_ids(508, seed=1), random_ids(40, seed=2)
    harness = Harness(model, replace(ENGINE, max_rows=1))
    harness.prefill(first[:500], [500])
    harness.logits(Segment(0, 500, first[500:508]))  # Aborted in the middle of a verify.
    assert all(tensor[0].any() for tensor in slot_tensors(harness.store)[:-1])
    if cleared:
        harness.store.clear(0)
        assert not any(tensor[0].any() for layer in harness.store.layers for tensor in layer.per_slot())
        assert all(pool.held(0) == 0 for pool in harness.store.pool.ratios.values())
    assert torch.equal(harness.prefill(second, [6, 1]), alone(model, second, 6))


@pytest.mark.twin
def test_a_failed_row_does_not_outlive_its_seat():
    """0 · NaN is NaN: masks alone do not keep out what a row with non-finite state left behind."""
    model, ids = model_of(torch.float32), random_ids(20, seed=2)
    harness = Harness(model)
    neighbour = random_ids(40, seed=3)
    harness.prefill(neighbour[:20], [20], slot=1)
    for tensor in slot_tensors(harness.store, writable=True):
        tensor[0].fill_(float("nan"))
    assert torch.equal(harness.logits(Segment(1, 20, neighbour[20:]))[0], alone(model, neighbour, 20)[20:])
    assert harness.prefill(ids, [20]).isnan().any(), "the NaNs do not reach the row: this test proves nothing"
    harness.store.clear(0)
    assert torch.equal(harness.prefill(ids, [6, 1]), alone(model, ids, 6))
