"""Where a prompt is cut changes nothing: the same logits at every position and the same state, bit for bit."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import TINY, Harness, entries_by_slot, random_ids, random_model, relative_difference, slot_tensors
from torch import Tensor

from polytempo.cache.layout import Segment

LENGTH = 300
DTYPES = (torch.float32, torch.bfloat16)
PROMPT_LENGTHS = (*range(1, 10), *range(126, 133), *range(254, 259))
pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))


@functools.cache
def model_of(dtype: torch.dtype):
    return random_model(seed=3, dtype=dtype)


@functools.cache
def in_one_piece(dtype: torch.dtype) -> tuple[Tensor, Harness]:
    harness = Harness(model_of(dtype))
    return harness.prefill(random_ids(LENGTH, seed=0), [LENGTH]), harness


@functools.cache
def token_by_token(dtype: torch.dtype) -> tuple[Tensor, Harness]:
    harness = Harness(model_of(dtype))
    return harness.prefill(random_ids(LENGTH, seed=0), [1]), harness


def check_same(dtype: torch.dtype, logits: Tensor, harness: Harness) -> None:
    whole, reference = in_one_piece(dtype)
    assert torch.isfinite(logits).all()
    assert torch.equal(logits, whole), f"first position that differs: {first_difference(logits, whole)}"
    for ours, theirs in zip(slot_tensors(harness.store), slot_tensors(reference.store), strict=True):
        assert torch.equal(ours[0], theirs[0])


def first_difference(ours: Tensor, theirs: Tensor) -> int:
    return int((ours != theirs).any(-1).nonzero()[0])


def entries_of(harness: Harness, slot: int, length: int) -> list[Tensor]:
    """Every entry and index entry that `length` tokens complete."""
    found = []
    for layer in harness.store.layers:
        for pooled in (layer.compressed, layer.index):
            if pooled is not None:
                entries = entries_by_slot(harness.store, pooled, layer.shape.ratio)
                found.append(entries[slot, : length // layer.shape.ratio])
    return found


def test_fixture_has_all_state(dtype):
    """The prompt completes entries of both ratios, makes the indexer choose, and no two positions look alike."""
    logits, harness = in_one_piece(dtype)
    assert logits.std() > 0.5
    assert LENGTH // 4 > TINY.index_topk and LENGTH // 128 == 2
    assert all(entries.float().abs().amax(-1).min() > 0.1 for entries in entries_of(harness, 0, LENGTH))
    assert len({tuple(row.argsort().tolist()) for row in logits}) == LENGTH


@pytest.mark.parametrize("size", (5, 64, 127, 128, 129, 299))
def test_chunks_of_one_size(dtype, size):
    harness = Harness(model_of(dtype))
    check_same(dtype, harness.prefill(random_ids(LENGTH, seed=0), [size]), harness)


def test_small_chunks_beside_each_other(dtype):
    """Chunks of 2, 3, 4 and 5, one row each in the same forwards; rows finish at different steps."""
    model, harness = model_of(dtype), Harness(model_of(dtype))
    streams = {size: random_ids(LENGTH, seed=size) for size in (2, 3, 4, 5)}
    logits: dict[int, list[Tensor]] = {size: [] for size in streams}
    for start in range(0, LENGTH, 2):
        step = start // 2
        segments = [
            Segment(size, step * size, ids[step * size : (step + 1) * size])
            for size, ids in streams.items()
            if step * size < LENGTH
        ]
        for segment, row in zip(segments, harness.logits(*segments), strict=True):
            logits[segment.slot].append(row)
    for size, ids in streams.items():
        whole = Harness(model)
        assert torch.equal(torch.cat(logits[size]), whole.prefill(ids, [LENGTH])), size
        for ours, theirs in zip(slot_tensors(harness.store), slot_tensors(whole.store), strict=True):
            assert torch.equal(ours[size], theirs[0]), size


def test_token_by_token(dtype):
    check_same(dtype, *token_by_token(dtype))


def split_at(cuts: list[int]) -> list[int]:
    bounds = [0, *sorted(cuts), LENGTH]
    return [end - start for start, end in zip(bounds, bounds[1:], strict=False)]


CUTS = st.lists(st.integers(1, LENGTH - 1), unique=True, min_size=1, max_size=12)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(cuts=CUTS)
def test_random_splits(dtype, cuts):
    harness = Harness(model_of(dtype))
    check_same(dtype, harness.prefill(random_ids(LENGTH, seed=0), split_at(cuts)), harness)


@pytest.mark.long
@settings(max_examples=300, deadline=None, derandomize=True)
@given(cuts=CUTS)
def test_many_random_splits(dtype, cuts):
    harness = Harness(model_of(dtype))
    check_same(dtype, harness.prefill(random_ids(LENGTH, seed=0), split_at(cuts)), harness)


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_prompt_lengths_at_entry_boundaries(dtype, length):
    """A prompt of 4 answered with the first token where one of 3 answered well: its first entry was wrong."""
    ids = random_ids(LENGTH, seed=0)
    expected, reference = token_by_token(dtype)
    harness = Harness(model_of(dtype))
    prompt = harness.prefill(ids[:length], [length])
    for ours, theirs in zip(entries_of(harness, 0, length), entries_of(reference, 0, length), strict=True):
        assert torch.equal(ours, theirs)
    num_after = 8 if dtype == torch.float32 else 2
    after = harness.prefill(ids[length : length + num_after], [1], start=length)
    assert torch.equal(torch.cat((prompt, after)), expected[: length + num_after])


@pytest.mark.parametrize("lengths", ((12, 11), (4, 129), (1, 128, 127)))
def test_uneven_prompts_together_and_apart(dtype, lengths):
    """Entries differed when a prompt was prefilled in an uneven batch: its tile came from the uniform case."""
    model = model_of(dtype)
    streams = [random_ids(length, seed=10 + row_idx) for row_idx, length in enumerate(lengths)]
    together = Harness(model)
    rows = together.logits(*(Segment(slot, 0, ids) for slot, ids in enumerate(streams)))
    chains = [[row] for row in rows]
    for _ in range(64 if dtype == torch.float32 else 16):
        for ids, chain in zip(streams, chains, strict=True):
            ids.append(int(chain[-1][-1].argmax()))
        rows = together.logits(*(Segment(slot, len(ids) - 1, ids[-1:]) for slot, ids in enumerate(streams)))
        for chain, row in zip(chains, rows, strict=True):
            chain.append(row)
    assert all(len(set(ids)) > 8 for ids in streams), "a chain that repeats itself proves little"
    for slot, (ids, chain) in enumerate(zip(streams, chains, strict=True)):
        apart = Harness(model)
        assert torch.equal(torch.cat(chain), apart.prefill(ids, [len(ids)]))
        for ours, theirs in zip(entries_of(together, slot, len(ids)), entries_of(apart, 0, len(ids)), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("sizes", ((80, 80), (127, 33), (128, 32), (1, 159)))
def test_neighbour_on_the_other_side_of_the_split(dtype, sizes):
    """The second part of a split prompt believed that nothing was computed before it, and lost its 128 boundary."""
    model, first = model_of(dtype), sizes[0]
    ids, others = random_ids(160, seed=20), random_ids(160, seed=21)
    harness = Harness(model)
    forwards = (
        [Segment(3, 0, others[:first])],
        [Segment(1, 0, ids[:first]), Segment(3, first, others[first:])],
        [Segment(1, first, ids[first:])],
    )
    logits: dict[int, list[Tensor]] = {1: [], 3: []}
    completed = []
    for segments in forwards:
        view = harness.view(segments)
        completed += zip(view.completed[128].slots.tolist(), view.completed[128].entry_ids.tolist(), strict=True)
        for segment, row in zip(segments, harness.logits(*segments), strict=True):
            logits[segment.slot].append(row)
    assert sorted(completed) == [(1, 0), (3, 0)]
    assert relative_difference(logits[1][-1][-1], logits[3][-1][-1]) > 0.05, "the rows must differ"
    for slot, row_ids in ((1, ids), (3, others)):
        unsplit = Harness(model)
        assert torch.equal(torch.cat(logits[slot]), unsplit.prefill(row_ids, [160]))
        entries, expected = (
            entries_by_slot(h.store, h.store.layers[2].compressed, 128) for h in (harness, unsplit)
        )
        assert expected[0, 0].abs().max() > 0.1
        assert torch.equal(entries[slot], expected[0])
        assert not entries[slot, 1:].any(), "there must be exactly one entry"
