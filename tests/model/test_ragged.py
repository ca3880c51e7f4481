"""A row's logits do not depend on its neighbours, its seat, its chunks, stale state or earlier wrong tokens."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from support import (
    ENGINE,
    TIGHT_ENGINE,
    TINY,
    Harness,
    alone,
    entries_by_slot,
    poison,
    random_ids,
    random_model,
    relative_difference,
    slot_tensors,
    visible_cells,
    with_ratios,
)
from torch import Tensor

from polytempo.cache.layout import Segment
from polytempo.cache.view import BatchView
from polytempo.cache.window import RingLayout
from polytempo.model import ops

DTYPES = (torch.float32, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))


@functools.cache
def model_of(dtype: torch.dtype):
    return random_model(seed=3, dtype=dtype)


@dataclass
class TestRow:
    """A row's tokens, how far it got, and the logits that came back."""

    __test__ = False
    ids: list[int]
    prompt_len: int
    slot: int = -1
    kv_len: int = 0
    logits: list[Tensor] = field(default_factory=list)

    def take(self, count: int) -> Segment:
        """Its next tokens: of the prompt at most `count`, after the prompt one."""
        room = self.prompt_len - self.kv_len
        end = self.kv_len + (min(count, room) if room > 0 else 1)
        return Segment(self.slot, self.kv_len, self.ids[self.kv_len : end])

    @property
    def finished(self) -> bool:
        return self.kv_len == len(self.ids)


def run_forward(harness: Harness, rows: list[TestRow], segments: list[Segment]) -> None:
    for row, segment, logits in zip(rows, segments, harness.logits(*segments), strict=True):
        row.logits.append(logits)
        row.kv_len = segment.end


def run_schedule(harness: Harness, rows: list[TestRow], seed: int) -> list[list[int]]:
    """Admit, step and retire rows at random until all are finished; the slot occupants of every step."""
    plan = random.Random(seed)
    waiting, running = list(rows), []
    free = list(range(harness.engine.max_rows))
    occupied = []
    while waiting or running:
        while waiting and free and plan.random() < 0.7:
            row = waiting.pop(0)
            row.slot = free.pop(plan.randrange(len(free)))
            harness.store.clear(row.slot)
            running.append(row)
        chosen = [row for row in running if plan.random() < 0.8]
        plan.shuffle(chosen)
        if chosen:
            # Small chunks, wide chunks and whole prompts, next to rows that decode.
            top = harness.engine.max_chunk
            segments = [row.take(plan.choice((plan.randint(1, 8), plan.randint(1, top), top))) for row in chosen]
            occupied.append([len(segment.token_ids) for segment in segments])
            run_forward(harness, chosen, segments)
        for row in [row for row in running if row.finished]:
            running.remove(row)
            free.append(row.slot)
    return occupied


def check_rows_alone(model, rows: list[TestRow]) -> None:
    for row in rows:
        expected = alone(model, row.ids, row.prompt_len)
        assert torch.isfinite(expected).all()
        assert torch.equal(torch.cat(row.logits), expected), f"row of {row.prompt_len} tokens in slot {row.slot}"


def check_not_degenerate(rows: list[TestRow]) -> None:
    """Distinct streams, all residues of 4, both sides of 128, and logits that tell rows apart."""
    assert len({row.ids[0] for row in rows}) == len({tuple(row.ids[1:]) for row in rows}) == len(rows)
    assert {row.prompt_len % 4 for row in rows} == {0, 1, 2, 3}
    assert {row.prompt_len // 128 > 0 for row in rows} == {True, False}
    last = [row.logits[-1][-1] for row in rows]
    assert min(relative_difference(a, b) for a, b in zip(last, last[1:], strict=False)) > 0.05


def ragged_rows(num_rows: int, seed: int, num_decode: int) -> list[TestRow]:
    """Prompts of 1 … 700 tokens, some at the edges of entries, each with its own stream."""
    plan = random.Random(seed)
    lengths = [1, 2, 3, 4, 5, 127, 128, 129, 255, 256, 700] + [plan.randint(1, 700) for _ in range(num_rows - 11)]
    plan.shuffle(lengths)
    rows = []
    for row_idx, length in enumerate(lengths):
        ids = random_ids(length + plan.randint(1, num_decode), seed=100 * seed + row_idx)
        # Rows that start with the same few tokens would agree where they must not.
        ids[0] = 2 + row_idx
        rows.append(TestRow(ids, length))
    return rows


@each_dtype
def test_32_prompts_come_and_go(dtype):
    model, rows = model_of(dtype), ragged_rows(32, seed=1, num_decode=6 if dtype == torch.float32 else 2)
    harness = Harness(model)
    occupied = run_schedule(harness, rows, seed=1)
    assert any(1 in sizes and max(sizes) > 64 for sizes in occupied), "no forward mixed chunks and single tokens"
    assert len({len(sizes) for sizes in occupied}) > 3, "the batch never changed its size"
    assert max(sum(row.slot == slot for row in rows) for slot in range(8)) > 2, "no slot was reused"
    check_not_degenerate(rows)
    check_rows_alone(model, rows)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 10))
@each_dtype
def test_32_prompts_come_and_go_at_many_seeds(dtype, seed):
    model, rows = model_of(dtype), ragged_rows(32, seed=seed, num_decode=24)
    engine = replace(ENGINE, max_chunk=random.Random(seed).choice((8, 64, 704)))
    run_schedule(Harness(model, engine), rows, seed=seed)
    check_not_degenerate(rows)
    check_rows_alone(model, rows)


STEP_LENGTHS = (3, 61, 62, 125, 127, 128, 130, 255)


@each_dtype
def test_24_steps_with_rebatching_every_step(dtype):
    """Rings as tight as they may be; every step takes other rows, in another order, 1 to 8 tokens each."""
    model, plan = model_of(dtype), random.Random(5)
    rows = [
        TestRow([2 + row_idx, *random_ids(length + 239, seed=40 + row_idx)], length, slot=7 - row_idx)
        for row_idx, length in enumerate(STEP_LENGTHS)
    ]
    harness = Harness(model, TIGHT_ENGINE)
    while any(row.kv_len < row.prompt_len for row in rows):
        chosen = [row for row in rows if row.kv_len < row.prompt_len]
        run_forward(harness, chosen, [row.take(8) for row in chosen])
    crossed = set()
    for step in range(24):
        chosen = plan.sample(rows, plan.randint(2, 8)) if step else list(rows)
        segments = []
        for row in chosen:
            count = plan.randint(1, 8)
            crossed |= {position % 128 for position in range(row.kv_len, row.kv_len + count)}
            segments.append(Segment(row.slot, row.kv_len, row.ids[row.kv_len : row.kv_len + count]))
        run_forward(harness, chosen, segments)
    assert 127 in crossed and {residue % 4 for residue in crossed} == {0, 1, 2, 3}
    assert max(row.kv_len for row in rows) > 2 * (TINY.sliding_window - 1 + TIGHT_ENGINE.max_chunk)
    check_not_degenerate(rows)
    for row in rows:
        row.ids = row.ids[: row.kv_len]
    check_rows_alone(model, rows[:1])
    for row in rows[1:]:
        assert torch.equal(torch.cat(row.logits), Harness(model).prefill(row.ids, [704])), row.prompt_len


def decode_rows(harness: Harness, slots: list[int], order: list[int], num_steps: int = 4) -> dict[int, Tensor]:
    """Prefill STEP_LENGTHS rows together and decode them together; logits by row index."""
    streams = [random_ids(length + num_steps, seed=60 + row_idx) for row_idx, length in enumerate(STEP_LENGTHS)]
    found: dict[int, list[Tensor]] = {row_idx: [] for row_idx in order}
    for step in range(num_steps + 1):
        segments = []
        for row_idx in order:
            length = STEP_LENGTHS[row_idx]
            bounds = (0, length) if step == 0 else (length + step - 1, length + step)
            segments.append(Segment(slots[row_idx], bounds[0], streams[row_idx][slice(*bounds)]))
        for row_idx, logits in zip(order, harness.logits(*segments), strict=True):
            found[row_idx].append(logits)
    return {row_idx: torch.cat(rows) for row_idx, rows in found.items()}


@each_dtype
def test_permuting_rows_and_slots(dtype):
    model, straight = model_of(dtype), list(range(8))
    expected = decode_rows(Harness(model), straight, straight)
    assert min(relative_difference(expected[a][-1], expected[a + 1][-1]) for a in range(7)) > 0.05
    for slots, order in (
        (straight[::-1], straight),
        (straight, straight[::-1]),
        ([3, 0, 6, 1, 7, 2, 5, 4], [5, 2, 7, 0, 1, 6, 3, 4]),
    ):
        found = decode_rows(Harness(model), slots, order)
        for row_idx, logits in expected.items():
            assert torch.equal(found[row_idx], logits), row_idx


@each_dtype
def test_removing_and_adding_rows(dtype):
    model, straight = model_of(dtype), list(range(8))
    expected = decode_rows(Harness(model), straight, straight)
    for order in ([0], [7], [1, 6], [0, 2, 4, 5, 7]):
        found = decode_rows(Harness(model), straight, order)
        for row_idx, logits in found.items():
            assert torch.equal(logits, expected[row_idx]), (order, row_idx)


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


def test_unequal_lengths_complete_their_own_entries():
    """Padding was pooled into entries: 7 tokens complete one ratio-4 entry and 13 complete three, whoever is near."""
    model = model_of(torch.float32)
    short, long = random_ids(7, seed=1), random_ids(13, seed=2)
    expected = [Harness(model).prefill(ids, [len(ids)]) for ids in (short, long)]
    for third in (None, random_ids(6, seed=3), random_ids(6, seed=4)):
        harness = Harness(model)
        segments = [Segment(2, 0, short), Segment(5, 0, long)]
        if third is not None:
            segments.insert(1, Segment(0, 0, third))
        logits = {segment.slot: row for segment, row in zip(segments, harness.logits(*segments), strict=True)}
        assert torch.equal(logits[2], expected[0]) and torch.equal(logits[5], expected[1])
        for layer in (harness.store.layers[1], harness.store.layers[3]):
            for pooled in (layer.compressed, layer.index):
                written = entries_by_slot(harness.store, pooled, 4).abs().amax(-1) > 0
                assert written[2].tolist() == [True] + [False] * (written.shape[1] - 1)
                assert written[5].tolist() == [True] * 3 + [False] * (written.shape[1] - 3)


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


def test_a_row_stays_while_its_neighbour_is_replaced():
    model, staying = model_of(torch.float32), random_ids(60, seed=1)
    expected = alone(model, staying, 30)
    harness = Harness(model, replace(ENGINE, max_rows=2))
    found = [harness.prefill(staying[:30], [30], slot=0)]
    for guest, length in enumerate((500, 3, 129)):
        ids = random_ids(length + 10, seed=10 + guest)
        harness.store.clear(1)
        guest_logits = []
        for step in range(10):
            place = 30 + guest * 10 + step
            span = (0, length) if step == 0 else (length + step - 1, length + step)
            mine, theirs = harness.logits(
                Segment(0, place, staying[place : place + 1]), Segment(1, span[0], ids[slice(*span)])
            )
            found.append(mine)
            guest_logits.append(theirs)
        assert torch.equal(torch.cat(guest_logits), alone(model, ids[: length + 9], length)), length
    assert torch.equal(torch.cat(found), expected)


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


# --- uniform batches ------------------------------------------------------------------------------------------


def groups_of(*segments: Segment):
    """Tile groups of a forward at layout ring."""
    return BatchView.build(segments, RingLayout(16, 64), (4, 128)).groups


def test_a_uniform_batch_holds_positions_and_mask_once():
    """Which path ran is asserted, since the values agree (see the next test)."""
    for count in (1, 5):
        (group,) = groups_of(*(Segment(slot, 70, [slot] * count) for slot in range(7)))
        assert group.is_uniform
        assert group.positions.shape[0] == group.key_positions.shape[0] == group.window_mask.shape[0] == 1
        assert group.token_idx.shape[0] == group.key_cells.shape[0] == 7
    (alone,) = groups_of(Segment(3, 70, [5]))
    assert alone.is_uniform
    (ragged,) = groups_of(*(Segment(slot, 70 + (slot == 6), [slot]) for slot in range(7)))
    assert not ragged.is_uniform and ragged.positions.shape[0] == ragged.window_mask.shape[0] == 7
    (same_start,) = groups_of(*(Segment(slot, 70, [slot] * (3 + slot % 2)) for slot in range(4)))
    assert not same_start.is_uniform, "rows that bring different counts share no positions"


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
        assert group.is_uniform is not with_fourth
        results.append(torch.cat(harness.logits(*segments)[:3]))
    assert torch.equal(*results)
