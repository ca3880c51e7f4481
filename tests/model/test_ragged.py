"""A row's logits do not depend on its neighbours, its seat or its chunks; see also test_stale_state."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from ragged_support import each_dtype, model_of
from support import ENGINE, TIGHT_ENGINE, TINY, Harness, alone, entries_by_slot, random_ids, relative_difference
from torch import Tensor

from polytempo.cache.layout import Segment


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
