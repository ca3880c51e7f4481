"""What a position may read: never a later token, and exactly the window and the finished entries of its past."""

from __future__ import annotations

import functools

import pytest
import torch
from support import (
    ENGINE,
    TINY,
    Harness,
    entries_by_slot,
    random_ids,
    random_model,
    relative_difference,
    slot_tensors,
    with_ratios,
)
from torch import Tensor

from polytempo.cache.layout import Segment

LAST = 300
"""Positions 0 … LAST are looked at; every stream has a few tokens after that."""


@functools.cache
def base() -> tuple[list[int], Tensor]:
    ids = random_ids(LAST + 3, seed=0)
    return ids, Harness(random_model(seed=3)).prefill(ids, [len(ids)])


def with_other_tail(ids: list[int], position: int, seed: int) -> list[int]:
    """The same tokens up to `position`; after it, every token is another one."""
    shifts = random_ids(len(ids), seed=seed, vocab_size=TINY.vocab_size - 2)
    return [
        token if place <= position else (token + shifts[place]) % TINY.vocab_size for place, token in enumerate(ids)
    ]


def test_later_tokens_move_nothing():
    """For every position: later tokens change, and every logit up to it stays, bit for bit, while the next moves."""
    ids, expected = base()
    assert expected.std() > 0.5
    harness = Harness(random_model(seed=3))
    for first in range(0, LAST + 1, ENGINE.max_rows):
        cuts = range(first, min(first + ENGINE.max_rows, LAST + 1))
        tails = [with_other_tail(ids, cut, seed=500 + cut) for cut in cuts]
        for tail, cut in zip(tails, cuts, strict=True):
            assert tail[: cut + 1] == ids[: cut + 1]
            assert not any(a == b for a, b in zip(tail[cut + 1 :], ids[cut + 1 :], strict=True))
        rows = harness.logits(*(Segment(slot, 0, tail) for slot, tail in enumerate(tails)))
        for cut, logits in zip(cuts, rows, strict=True):
            assert torch.equal(logits[: cut + 1], expected[: cut + 1]), cut
            assert relative_difference(logits[cut + 1], expected[cut + 1]) > 1e-2, cut


def test_an_earlier_token_moves_every_later_position():
    """A far token, and a near one, reach all later positions and none before them."""
    ids, expected = base()
    for changed in (0, 40, 127, 200, 290):
        other = list(ids)
        other[changed] = (ids[changed] + 11) % TINY.vocab_size
        logits = Harness(random_model(seed=3)).prefill(other, [len(ids)])
        assert torch.equal(logits[:changed], expected[:changed])
        for position in range(changed, LAST + 1):
            assert relative_difference(logits[position], expected[position]) > 1e-4, (changed, position)


def reads(ratio: int, position: int, token: int) -> bool:
    """Whether a query of a single layer of this ratio that keeps all entries reads that token, by the rules."""
    if position - TINY.sliding_window < token <= position:
        return True
    if not ratio:
        return False
    entries = {token // ratio, token // ratio + 1} if ratio == 4 else {token // ratio}
    return any(entry < (position + 1) // ratio for entry in entries)


@pytest.mark.parametrize("ratio", (0, 4, 128))
def test_one_layer_reads_exactly_its_window_and_finished_entries(ratio):
    """The set of positions that one token moves, for tokens at every residue of 4 and around 128 and 256."""
    model = random_model(with_ratios(ratio, num_hash_layers=0, index_topk=512), seed=5)
    ids = random_ids(LAST, seed=1)
    expected = Harness(model).prefill(ids, [LAST])
    places = (0, 1, 2, 3, 4, 9, 10, 11, 126, 127, 128, 129, 254, 255, 256, 299)
    for first in range(0, len(places), ENGINE.max_rows):
        group = places[first : first + ENGINE.max_rows]
        streams = []
        for changed in group:
            streams.append(list(ids))
            streams[-1][changed] = (ids[changed] + 11) % TINY.vocab_size
        rows = Harness(model).logits(*(Segment(slot, 0, stream) for slot, stream in enumerate(streams)))
        for changed, logits in zip(group, rows, strict=True):
            moved = (logits != expected).any(-1).tolist()
            predicted = [position >= changed and reads(ratio, position, changed) for position in range(LAST)]
            wrong = [p for p in range(LAST) if moved[p] != predicted[p]]
            assert not wrong, f"token {changed} and positions {wrong[:8]}"
            if ratio and changed < 256:
                assert sum(moved) > TINY.sliding_window


@pytest.mark.parametrize("index_topk", (1, 8))
def test_a_choosing_query_reads_no_more_than_it_keeps(index_topk):
    """With top_k entries of 4 + 4 tokens each, a far query reads at most window + 8 · top_k tokens."""
    model = random_model(with_ratios(4, num_hash_layers=0, index_topk=index_topk), seed=5)
    ids = random_ids(200, seed=1)
    query = 199
    harness = Harness(model)
    expected = harness.prefill(ids[:query], [query])
    expected = harness.prefill(ids[query:], [1], start=query)
    entries = entries_by_slot(harness.store, harness.store.layers[0].compressed, 4, writable=True)
    readers = []
    for entry in range(200 // 4):
        kept = entries[0, entry].clone()
        entries[0, entry].neg_()
        if not torch.equal(harness.prefill(ids[query:], [1], start=query), expected):
            readers.append(entry)
        # Entry 49 is finished by the query itself, so negating it beforehand is undone.
        entries[0, entry] = kept
    finished_by_query = 1
    assert index_topk - finished_by_query <= len(readers) <= index_topk, readers


@pytest.mark.parametrize("top_k", (512, 8))
def test_far_token_is_recoverable_only_through_its_ratio_4_entries(top_k):
    """Good below 200 tokens, loops beyond. One layer, so nothing but entries 10 and 11 knows token 41."""
    model, planted = random_model(with_ratios(4, num_hash_layers=0, index_topk=top_k), seed=5), 41
    ids = random_ids(201, seed=1)
    other = [*ids]
    entries = {}
    kept = spy_kept_entries(model, ids)
    if top_k == 8:  # Plant the token in an entry that the query at 200 chooses.
        planted = 4 * next(entry for entry in kept if 4 <= entry <= 40) + 1
    touched = [planted // 4, planted // 4 + 1]
    other[planted] = (ids[planted] + 31) % TINY.vocab_size
    assert 200 - planted > 2 * TINY.sliding_window
    harnesses = {}
    for name, stream in (("this", ids), ("other", other)):
        harnesses[name] = harness = Harness(model)
        harness.prefill(stream[:200], [64])
        entries[name] = [t.clone() for t in slot_tensors(harness.store)]
    base = harnesses["this"].prefill(ids[200:], [1], start=200)
    moved = harnesses["other"].prefill(ids[200:], [1], start=200)
    assert relative_difference(moved, base) > 1e-3
    for part in ("compressed", "index"):
        mine, theirs = (
            entries_by_slot(store, getattr(store.layers[0], part), 4, writable=True)
            for store in (harnesses["other"].store, harnesses["this"].store)
        )
        differ = (mine[0] != theirs[0]).any(-1).nonzero().flatten().tolist()
        assert differ == touched
        mine[0, touched] = theirs[0, touched]
    assert torch.equal(harnesses["other"].prefill(ids[200:], [1], start=200), base)


def spy_kept_entries(model, ids: list[int]) -> list[int]:
    """Entries that the last token's query reads in layer 0."""
    from polytempo.model import cached_attention

    seen, original = [], cached_attention.choose_entries

    def spy(scores, num_visible, top_k):
        seen.append(original(scores, num_visible, top_k))
        return seen[-1]

    cached_attention.choose_entries = spy
    try:
        harness = Harness(model.with_kernels("torch"))
        harness.prefill(ids[:-1], [64])
        seen.clear()
        harness.prefill(ids[-1:], [1], start=len(ids) - 1)
    finally:
        cached_attention.choose_entries = original
    return seen[0].flatten().tolist() if seen else []
