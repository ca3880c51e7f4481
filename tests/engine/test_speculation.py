"""Rows of one batch advance by different counts, and every one equals itself alone without speculation."""

import random

import pytest
from scripted_runs import ROTATING, run_scripted
from speculation_support import (
    GREEDY,
    LENGTHS,
    Script,
    answer,
    assert_dictated,
    assert_ragged,
    begins_like,
    cycle,
    drive,
    make_llm,
    model_of,
    of_row,
    oracle,
    prompt_of,
    row_of,
)
from support import TINY

from polytempo.types import FinishReason, SamplingParams

SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=120, ignore_eos=True, logprobs=2)


def test_oracle_is_not_degenerate():
    """Streams differ, do not repeat one token, and cross a boundary of 128."""
    outputs = [oracle(model_of(), prompt_of(length), GREEDY).output_token_ids for length in LENGTHS]
    assert min(len(set(output)) for output in outputs) > 40
    assert len({tuple(output[:20]) for output in outputs}) == len(LENGTHS)
    assert {length % 4 for length in LENGTHS} == {1, 2, 3} and any(n < 128 < n + 200 for n in LENGTHS)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_rotating_acceptance(order):
    """Field case 1: unequal rows, unequal acceptance, prompts in chunks beside verifies; any order of rows."""
    patterns = [cycle(*(step[place] for step in ROTATING)) for place in order]
    script, steps, rows, _ = run_scripted([LENGTHS[place] for place in order], patterns, draft_len=3, max_chunk=40)
    assert_ragged(steps, num_residues=4)
    assert any({(bool(a.num_drafts), a.verifies) for a in step} >= {(True, True), (False, False)} for step in steps)
    assert_dictated(script, steps, rows)
    most = max(len(step) for step in steps)
    assert most == 4 and len(steps) < 100, "200 tokens per row in at most half as many steps"


@pytest.mark.parametrize(("length", "offset"), [(3, 3), (126, 0)])
def test_one_row_alone_with_drafts(length, offset):
    script, steps, rows, _ = run_scripted([length], [cycle(0, 3, 1, 2, offset=offset)], draft_len=3)
    assert {a.num_emitted for a in of_row(steps, rows[0])} == {1, 2, 3, 4}
    assert any(a.rewinds_across(128) for a in of_row(steps, rows[0]))
    assert_dictated(script, steps, rows)


def test_cohort_advances_all_rows_by_the_least():
    """The baseline mode: what a row is held back from is verified again, and no token changes."""
    patterns = [cycle(1, 3, 2), cycle(3, 2, 3, 1), cycle(2, 1, 3, 3, 3), cycle(3, 3, 1)]
    options = {"draft_len": 3, "kv_advance": "cohort", "max_tokens": 100}
    script, steps, rows, _ = run_scripted(LENGTHS, patterns, **options)
    together = [[a for a in step if a.verifies] for step in steps]
    assert all(len({a.num_emitted for a in step}) <= 1 for step in together)
    assert max(step[0].num_emitted for step in together if len(step) == 4) > 1
    held = [a for step in together for a in step if a.num_drafts]
    accepted = [right for row in rows for _, right in script.of(row)]
    assert sum(a.num_emitted - 1 for a in held) < sum(accepted), "nobody was held back"
    assert sum(row.stats.num_accepted for row in rows) == sum(accepted), "statistics count what the target accepted"


def test_seven_drafts_from_every_residue():
    """Field case 3: a verify over two or three ratio-4 spans, cut after 1 … 7 accepted drafts from each residue."""
    generator = random.Random(3)
    order = [generator.sample(range(1, 8), 7) + generator.sample(range(1, 8), 7) for _ in LENGTHS]
    script, steps, rows, _ = run_scripted(LENGTHS, [cycle(*counts) for counts in order], draft_len=7)
    verifies = [a for step in steps for a in step if a.num_drafts == 7]
    cases = {(a.start % 4, a.num_emitted - 1) for a in verifies}
    assert cases == {(residue, count) for residue in range(4) for count in range(1, 8)}, "not all 28 cases occur"
    assert_ragged(steps, num_residues=4)
    assert_dictated(script, steps, rows)


def test_more_drafts_than_the_window():
    """Field case 3: a verify wider than the sliding window, whose rejected keys lie where older ones were."""
    counts = (0, 19, 7, 16, 1, 17, 18, 3, 15)
    patterns = [cycle(*counts, offset=place) for place in (0, 3, 5)]
    assert TINY.sliding_window < 19
    script, steps, rows, _ = run_scripted((17, 126, 131), patterns, draft_len=19, max_tokens=120)
    assert_ragged(steps)
    assert {right for row in rows for _, right in script.of(row)} >= set(counts)
    assert_dictated(script, steps, rows)


@pytest.mark.parametrize(("draft_len", "counts"), [(2, (1,)), (1, (1, 0))])
def test_partial_acceptance_on_every_step(draft_len, counts):
    """Field case 4: after the accepted draft comes the target's own token, never that of another verify position."""
    script, steps, rows, _ = run_scripted(LENGTHS, [cycle(*counts)] * 4, draft_len=draft_len)
    assert max(len(of_row(steps, row)) for row in rows) >= 100
    assert_dictated(script, steps, rows)


@pytest.mark.parametrize("draft_len", [1, 3])
def test_last_draft_always_rejected(draft_len):
    """Field case 27: the correction after the last draft is kept, at once, greedy and seeded."""
    options = {"draft_len": draft_len, "max_tokens": 60 * draft_len}
    params = [GREEDY, SEEDED, GREEDY]
    script, steps, rows, _ = run_scripted((3, 17, 126), [cycle(draft_len - 1)] * 3, params, **options)
    for row in rows:
        whole = [a for a in of_row(steps, row) if a.num_drafts == draft_len]
        assert len(whole) >= 39 and {a.num_emitted for a in whole} == {draft_len}
        assert all(a.kept == a.start + draft_len for a in whole)
    assert_dictated(script, steps, rows)


def test_aborted_in_mid_verify_and_slot_reused():
    """Field case 17: one seat; a long row ends while drafts await their verify, and the next is as on a new engine."""
    model = model_of()
    llm = make_llm(model, max_rows=1, draft_len=3)
    script = Script().install(llm)
    first = row_of(llm, prompt_of(131), GREEDY)
    second = row_of(llm, prompt_of(17), GREEDY)
    script.add(first, oracle(model, prompt_of(131), GREEDY).output_token_ids, cycle(3, 0, 2))
    script.add(second, oracle(model, prompt_of(17), GREEDY).output_token_ids, cycle(1, 3, 0))
    llm.engine.add([first])
    llm.engine.add([second])

    def abort(step: int) -> None:
        if step == 6:
            assert first.drafts and first.slot == 0 and len(first.output_token_ids) > 5
            assert llm.engine.abort(first.request.request_id) == 1
            assert first.drafts == [] and first.slot is None

    steps = drive(llm, after_step=abort)
    assert first.finish_reason is FinishReason.ABORT and any(a.row is second for a in steps[6])
    assert answer(second) == answer(oracle(model, prompt_of(17), GREEDY))
    assert begins_like(first, oracle(model, prompt_of(131), GREEDY))
