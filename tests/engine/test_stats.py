"""Statistics of drafts equal hand counts, before a stop trims the run; requests get what they pay for."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speculation_support import (
    GREEDY,
    Script,
    assert_dictated,
    cycle,
    drive,
    make_llm,
    model_of,
    of_row,
    oracle,
    prompt_of,
    row_of,
)

from polytempo.engine.bad_words import BadWords
from polytempo.engine.draw import sampling_position
from polytempo.engine.row import Request, Row
from polytempo.engine.stats import DraftStats
from polytempo.types import FinishReason, SamplingParams

FREE = replace(GREEDY, max_tokens=45)


def counts(stats: DraftStats) -> tuple:
    return (stats.num_verifies, stats.num_drafted, stats.num_accepted, stats.drafted_at, stats.accepted_at)


def test_hand_counts():
    """Field case 39: three verifies of 4, 2 and 0 drafts, of which 2, 2 and 0 are right."""
    stats = DraftStats()
    assert (stats.acceptance_rate, stats.mean_acceptance_length, stats.acceptance_by_place) == (None, None, [])
    for drafted, accepted in ((4, 2), (2, 2), (0, 0)):
        stats.record(drafted, accepted)
    assert counts(stats) == (3, 6, 4, [2, 2, 1, 1], [2, 2, 0, 0])
    assert stats.acceptance_rate == 4 / 6 and stats.mean_acceptance_length == 1 + 4 / 3
    assert stats.acceptance_by_place == [1.0, 1.0, 0.0, 0.0]
    longer, shorter = DraftStats(), DraftStats()
    longer.record(5, 5)
    shorter.record(1, 0)
    for other in (longer, shorter):
        stats.add(other)
    assert counts(stats) == (5, 12, 9, [4, 3, 2, 2, 1], [3, 3, 1, 1, 1])
    assert counts(shorter) == (1, 1, 0, [1], [0]), "adding changes the sum only"


RUNS = st.lists(st.integers(0, 6).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), max_size=12)


@settings(max_examples=100, deadline=None)
@given(RUNS, RUNS)
def test_counts_add_up(first, second):
    """Whether verifies are recorded in one place or summed from two, counts and formulas are the same."""
    one, both = DraftStats(), DraftStats()
    for runs in (first, second):
        part = DraftStats()
        for drafted, accepted in runs:
            one.record(drafted, accepted)
            part.record(drafted, accepted)
        both.add(part)
    assert counts(one) == counts(both)
    runs = first + second
    assert one.drafted_at == [sum(k > place for k, _ in runs) for place in range(len(one.drafted_at))]
    assert one.accepted_at == [sum(a > place for _, a in runs) for place in range(len(one.accepted_at))]
    assert sum(one.accepted_at) == one.num_accepted and sum(one.drafted_at) == one.num_drafted
    if all(k == 6 for k, _ in runs):
        assert one.acceptance_by_place == sorted(one.acceptance_by_place, reverse=True)


def test_scripted_run_cut_by_eos():
    """Field case 39: known accepts, then a run that EOS ends at its second token: all of it was accepted."""
    model, prompt = model_of(), prompt_of(17)
    free = oracle(model, prompt, FREE).output_token_ids
    stop_at = next(i for i in range(9, 40) if free[i] not in free[:i])
    llm = make_llm(model, draft_len=4)
    script = Script().install(llm)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    row = row_of(llm, prompt, params, (("stop_token_ids", frozenset({free[stop_at]})),))
    beside = row_of(llm, prompt_of(126), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, draft_len=1))
    # Output 0 comes from the prompt; then the verifies bring the stop to offset 1 of the last run.
    lead, runs = stop_at - 2, []
    while lead:
        runs.append(min(3, lead) - 1)
        lead -= runs[-1] + 1
    script.add(row, free, lambda place, most: (most, runs[place] if place < len(runs) else most))
    script.add(beside, oracle(model, prompt_of(126), FREE).output_token_ids, cycle(0, 1))
    llm.engine.add([row])
    llm.engine.add([beside])
    steps = drive(llm)
    lasts = of_row(steps, row)
    assert lasts[-1].num_emitted == 2 and lasts[-1].num_drafts == 4 and row.finish_reason is FinishReason.STOP
    accepted = [*runs, 4]
    verifies = len(accepted) + 1  # the one at the prompt's end has no drafts
    assert counts(row.stats) == (
        verifies, 4 * len(accepted), sum(accepted), [len(accepted)] * 4,
        [sum(count > place for count in accepted) for place in range(4)],
    )  # fmt: skip
    cut = 4 + 1 - 2
    assert sum(count + 1 for count in accepted) + 1 - cut == len(row.output_token_ids) == stop_at + 1
    # The neighbour drafted once, wrongly: its last token had no room for a draft.
    drafted = [(a.num_drafts, a.num_emitted) for a in of_row(steps, beside)]
    assert drafted == [(0, 1), (1, 1), (1, 2)] and counts(beside.stats) == (3, 2, 1, [2], [1])
    total = DraftStats()
    total.add(row.stats)
    total.add(beside.stats)
    assert counts(llm.engine.stats) == counts(total)


def test_engine_statistics_hold_aborted_rows_too():
    model = model_of()
    llm = make_llm(model, draft_len=2)
    script = Script().install(llm)
    row = row_of(llm, prompt_of(17), GREEDY)
    script.add(row, oracle(model, prompt_of(17), FREE).output_token_ids, cycle(1, 2))
    llm.engine.add([row])
    drive(llm, after_step=lambda step: llm.engine.abort(row.request.request_id) if step == 4 else None)
    assert counts(llm.engine.stats) == (4, 6, 4, [3, 3], [3, 1])


@pytest.mark.parametrize("kv_advance", ["per_sequence", "cohort"])
def test_max_tokens_1_to_12(kv_advance):
    """Field case 25: with all drafts right, tokens == max_tokens == usage == logprob entries, and totals agree."""
    model, prompt = model_of(), prompt_of(17)
    free = oracle(model, prompt, FREE)
    llm = make_llm(model, draft_len=4, max_rows=12, kv_advance=kv_advance)
    script, rows = Script().install(llm), []
    for max_tokens in range(1, 13):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
        rows.append(script.add(row_of(llm, prompt, params), free.output_token_ids, cycle(4)))
        llm.engine.add([rows[-1]])
    steps = drive(llm)
    for max_tokens, row in enumerate(rows, start=1):
        assert row.output_token_ids == free.output_token_ids[:max_tokens] and row.logprobs == free.logprobs[:max_tokens]
        assert row.finish_reason is FinishReason.LENGTH
        assert sum(a.num_emitted for a in of_row(steps, row)) == max_tokens
        room = [max_tokens - sum(a.num_emitted for a in of_row(steps, row)[:place])
                for place in range(len(of_row(steps, row)))]  # fmt: skip
        drafts = [a.num_drafts for a in of_row(steps, row)]
        assert drafts == [0, *(min(4, left - 1) for left in room[1:])], "drafts that max_tokens would cut are not made"
        if kv_advance == "per_sequence":
            assert row.stats.num_verifies + row.stats.num_accepted == max_tokens, "what was accepted was delivered"
    assert sum(len(row.output_token_ids) for row in rows) == 78
    assert llm.engine.stats.num_verifies == sum(row.stats.num_verifies for row in rows)
    if kv_advance == "per_sequence":
        assert_dictated(script, steps, [row for row in rows if script.of(row)])


def test_sampling_position_is_the_place_of_the_token():
    """The noise of a token is addressed by its absolute index: prompt, output and the drafts before it."""
    request = Request("r", None, [5, 6, 7], SamplingParams(), 99, frozenset({4}), BadWords.of([(1, 2)]), 0.0)
    row = Row(request, choice=3, output_token_ids=[8, 9])
    for drafts, position in (((), 5), ((10,), 6), ((10, 11), 7)):
        at = sampling_position(row, drafts)
        assert (at.position, list(at.history)) == (position, [8, 9, *drafts])
        assert (at.prompt_token_ids, at.seed, at.choice) == ([5, 6, 7], 99, 3)
        assert (at.params, at.stop_token_ids, at.bad_words) == (request.params, {4}, request.bad_words)
    assert row.output_token_ids == [8, 9]


def test_drafts_do_not_outlive_the_row():
    row = Row(Request("r", None, [5], SamplingParams(), 0, frozenset(), (), 0.0), 0, drafts=[1, 2])
    row.finish(FinishReason.ABORT)
    assert row.drafts == []
