"""After a rewind a row's state is that of a row which only ever saw the accepted tokens, bit for bit."""

import functools

import pytest
import torch
from speculation_support import (
    MTPUnderScript,
    Script,
    drive,
    make_llm,
    model_of,
    of_row,
    oracle,
    prompt_of,
    write_missing_keys,
)
from support import TINY, slot_tensors, visible_cells

from polytempo.types import SamplingParams

BASE = 112
"""Length of the one prompt whose continuation all rows share; every start is a prefix of it."""
AFTER = 140
STARTS = tuple(range(120, 137))
PARAMS = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True, logprobs=4)
WIDE = {"max_chunk": 160, "max_step_tokens": 4096, "max_rows": len(STARTS)}
TIGHT = {"max_chunk": 8, "max_step_tokens": 4096, "max_rows": 8}
"""Rings with no cell to spare: a verify of seven drafts overwrites the oldest cells that a rewind may still need."""


@functools.cache
def stream(dtype):
    """The prompt's greedy continuation, alone: (all tokens, logprobs by position)."""
    row = oracle(model_of(dtype=dtype), prompt_of(BASE), PARAMS)
    return [*prompt_of(BASE), *row.output_token_ids], row


def visible(llm, slot: int, length: int):
    """What the tokens after `length` may read of a slot, per tensor of the store."""
    store = llm.engine.target.store
    masks = visible_cells(TINY, store, {slot: length})
    return [tensor[slot][mask[slot]].clone() for tensor, mask in zip(slot_tensors(store), masks, strict=True)]


@functools.cache
def reference_states(dtype, max_chunk: int, longest: int) -> dict[int, list]:
    """State by length, of a row that was fed the stream's tokens one by one and never drafted."""
    llm = make_llm(model_of(dtype=dtype), max_rows=1, max_chunk=max_chunk, max_step_tokens=4096)
    llm.engine.proposer = MTPUnderScript(llm.engine.target, None)
    tokens, _ = stream(dtype)
    (row,) = llm.rows_of(tokens[:BASE], SamplingParams(temperature=0.0, max_tokens=longest - BASE + 2, ignore_eos=True))
    llm.engine.add([row])
    states = {}

    def keep(_: int) -> None:
        if row.slot is not None and row.output_token_ids:
            write_missing_keys(llm, row)
            states[row.kv_len] = visible(llm, 0, row.kv_len)

    drive(llm, after_step=keep)
    assert set(states) >= set(range(BASE, longest + 1)) and row.stats.num_drafted == 0
    return states


def sweep(cases, draft_len: int, options, dtype=torch.float32, after: int = AFTER, later=(0,)):
    """Prompts of given lengths, one verify each that accepts a given count, then `after` more tokens.

    Args:
        cases: (start, accepted) of every row of one batch.
        draft_len: drafts of the verify.
        options: engine options.
        dtype: of the model.
        after: tokens that each row emits after the verify.
        later: right drafts of the verifies that follow, in turn; (0,) are all wrong.
    """
    model = model_of(dtype=dtype)
    tokens, alone = stream(dtype)
    assert BASE + PARAMS.max_tokens >= max(start for start, _ in cases) + draft_len + after + 2
    states = reference_states(dtype, options["max_chunk"], max(start for start, _ in cases) + draft_len + 1)
    llm = make_llm(model, draft_len=draft_len, **options)
    script = Script()
    llm.engine.proposer = MTPUnderScript(llm.engine.target, script)
    rows = []
    for start, accepted in cases:
        params = SamplingParams(temperature=0.0, max_tokens=1 + accepted + 1 + after, ignore_eos=True, logprobs=4)
        (row,) = llm.rows_of(tokens[:start], params)
        counts = (accepted, *later)
        script.add(row, tokens[start:], lambda place, most, counts=counts: (
            most, min(most, counts[0] if not place else counts[1:][(place - 1) % len(counts[1:])])))  # fmt: skip
        llm.engine.add([row])
        rows.append(row)
    compared, moved = set(), 0

    def compare(_: int) -> None:
        nonlocal moved
        for (start, accepted), row in zip(cases, rows, strict=True):
            if row.slot is None or row.kv_len != start + accepted + 1 or (start, accepted) in compared:
                continue
            compared.add((start, accepted))
            write_missing_keys(llm, row)
            state = visible(llm, row.slot, row.kv_len)
            for found, expected in zip(state, states[row.kv_len], strict=True):
                assert torch.equal(found, expected), (start, accepted)
            if accepted < draft_len:
                moved += rejected_left_state(llm, row, start + draft_len + 1)

    steps = drive(llm, after_step=compare)
    assert compared == set(cases)
    rejecting = sum(accepted < draft_len for _, accepted in cases)
    assert moved == rejecting, "rejected drafts left nothing behind that a rewind must undo"
    for (start, accepted), row in zip(cases, rows, strict=True):
        first = of_row(steps, row)[1]
        assert (first.start, first.end, first.num_emitted) == (start, start + draft_len + 1, accepted + 1)
        past = start - BASE
        count = len(row.output_token_ids)
        assert count == after + accepted + 2
        assert row.output_token_ids == alone.output_token_ids[past : past + count], (start, accepted)
        assert row.logprobs == alone.logprobs[past : past + count], (start, accepted)
    return steps, rows


def rejected_left_state(llm, row, fed_to: int) -> bool:
    """Whether cells past the row's end hold keys of rejected drafts: nothing was cleaned up, all must be masked."""
    window = llm.engine.target.store.layers[0].window[row.slot]
    return all(bool(window[position % len(window)].abs().sum() > 0) for position in range(row.kv_len, fed_to))


def test_fixture_is_not_degenerate():
    """Neighbouring lengths have different states, and every kind of state is among what is compared."""
    states = reference_states(torch.float32, 160, 142)
    for length in range(BASE, 142):
        window = states[length][0]
        assert window.shape == states[length + 1][0].shape and not torch.equal(window, states[length + 1][0])
    sizes = [len(part) for part in states[131]]
    # Window; window, inputs of the open span and the one before, entries, the same of the indexer; …; MTP window.
    assert sizes == [15, 15, 7, 7, 32, 7, 7, 32, 15, 3, 3, 1, 15, 7, 7, 32, 7, 7, 32, 15]
    assert [len(part) for part in states[127]][9:12] == [127, 127, 0]


@pytest.mark.parametrize("shift", range(6))
def test_every_start_around_128_and_every_count(shift):
    """17 rows at starts 120 … 136, each with its own accepted count of 5; six batches hold all 102 cases."""
    cases = [(start, (start + shift) % 6) for start in STARTS]
    # By default 140 more tokens for a spread of cases; all of them in the long sweep.
    steps, _ = sweep(cases, 5, WIDE, after=AFTER if shift == 2 else 12, later=(5, 0, 3) if shift == 2 else (5, 2))
    verifies = [a for step in steps for a in step if a.num_drafts == 5 and a.start in STARTS]
    assert {a.start % 4 for a in verifies} == {0, 1, 2, 3}
    assert any(a.rewinds_across(128) for a in verifies) and sum(a.rewinds_across(4) for a in verifies) > 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("start", [122, 123, 124, 125])
def test_seven_drafts_in_rings_without_a_spare_cell(start, dtype):
    """K=7 from every residue of 4, every count, in the smallest rings; the verify of start 122 … 125 spans 128."""
    cases = [(start, accepted) for accepted in range(8)]
    steps, _ = sweep(cases, 7, TIGHT, dtype, after=12, later=(7, 3))
    assert any(a.rewinds_across(128) for step in steps for a in step)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("later", [(0,), (5, 1, 3)], ids=["rejecting", "mixed"])
@pytest.mark.parametrize("shift", range(6))
def test_every_case_for_140_more_tokens(shift, later, dtype):
    sweep([(start, (start + shift) % 6) for start in STARTS], 5, WIDE, dtype, later=later)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("start", [start for start in STARTS if start % TIGHT["max_chunk"] != 1])
def test_seven_drafts_for_140_more_tokens(start, dtype):
    sweep([(start, accepted) for accepted in range(8)], 7, TIGHT, dtype, later=(0, 7, 3))
