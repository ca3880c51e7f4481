"""Requests of every kind with drafts: neighbours, seeds, options, limits. Each equals itself without speculation."""

import copy
import random
from dataclasses import replace

import pytest
from speculation_support import (
    GREEDY,
    Script,
    answer,
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
from polytempo.engine.propose import ScriptedProposer
from polytempo.types import FinishReason, SamplingParams


def greedy(**options) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "logprobs": 2, **options})


def test_batch_drains_while_it_speculates():
    """Field case 18: eight rows end one after the other, lengths 14 and 700 among them, the long prompt in chunks."""
    model = model_of()
    lengths = (14, 700, 3, 126, 17, 131, 50, 8)
    llm = make_llm(model, draft_len=2)
    script, rows, expected = Script().install(llm), [], []
    for place, length in enumerate(lengths):
        params = greedy(max_tokens=5 * (place + 1))
        expected.append(oracle(model, prompt_of(length), params))
        row = row_of(llm, prompt_of(length), params)
        rows.append(script.add(row, expected[-1].output_token_ids, cycle(0, 2, 1, offset=place)))
        llm.engine.add([row])
    steps = drive(llm, max_steps=100)
    sizes = [len(step) for step in steps]
    drained = sizes[sizes.index(8) :]
    assert drained == sorted(drained, reverse=True) and len(set(drained)) >= 6 and drained[-1] == 1
    assert [len(row.output_token_ids) for row in rows] == [5 * (place + 1) for place in range(8)]
    assert [answer(row) for row in rows] == [answer(row) for row in expected]
    assert_dictated(script, steps, rows)


def tied_model():
    """Two ids with exactly equal logits: the lower one is a greedy output's most frequent token."""
    base = model_of()
    output = oracle(base, prompt_of(17), GREEDY).output_token_ids[:120]
    low = max((token for token in set(output) if token < 60), key=output.count)
    model = copy.deepcopy(base)
    high = next(token for token in range(low + 1, 97) if token not in output)
    model.head.weight[high] = model.head.weight[low]
    return model, low, high


def test_equal_maxima_go_to_the_lowest_id():
    """Field case 28: a greedy row takes the lower of two equal ids, though drafts say the other, whoever is beside."""
    model, low, high = tied_model()
    params = greedy(max_tokens=120, logprobs=1)
    expected = oracle(model, prompt_of(17), params)
    entry = expected.logprobs[expected.output_token_ids.index(low)]
    assert expected.output_token_ids.count(low) >= 5 and high not in expected.output_token_ids
    assert set(entry) == {low} and entry[low].rank == 1
    for neighbours in (0, 2):
        llm = make_llm(model, draft_len=3)
        row = row_of(llm, prompt_of(17), params)
        others = [llm.rows_of(list(prompt_of(20 + i)), SamplingParams(temperature=1.0, max_tokens=60))[0]
                  for i in range(neighbours)]  # fmt: skip

        def lure(asked, most, expected=expected, row=row):
            if asked is not row:
                return [5] * most
            done = len(row.output_token_ids)
            return [high if token == low else token for token in expected.output_token_ids[done : done + most]]

        llm.engine.proposer = ScriptedProposer(lure)
        for one in (*others, row):
            llm.engine.add([one])
        steps = drive(llm)
        assert answer(row) == answer(expected)
        rejected = [a for a in of_row(steps, row) if a.num_emitted <= a.num_drafts]
        assert rejected and row.stats.num_accepted > 50, "the lure was never drafted, or nothing else was right"


def test_top_k_alone_samples_three_tokens():
    """Field case 28: a row with nothing but top_k=3 is sampled at temperature 1 over three tokens, drafts or not."""
    model = model_of()
    params = SamplingParams(top_k=3, seed=5, max_tokens=60, ignore_eos=True, logprobs=3)
    expected = oracle(model, prompt_of(17), params)
    ranks = [entry[token].rank for token, entry in zip(expected.output_token_ids, expected.logprobs, strict=True)]
    assert set(ranks) == {1, 2, 3}
    llm = make_llm(model, draft_len=4)
    script = Script().install(llm)
    row = row_of(llm, prompt_of(17), params)
    script.add(row, expected.output_token_ids, cycle(4, 1, 3, 0, 2))
    llm.engine.add([row])
    steps = drive(llm)
    assert answer(row) == answer(expected)
    assert_dictated(script, steps, [row])


SEEDED = SamplingParams(temperature=0.8, seed=42, max_tokens=28, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize("draft_len", range(8))
def test_seeded_request_whatever_stands_beside_it(draft_len):
    """Field case 29: one seed, every draft length; neighbours unseeded or otherwise seeded come, go, are aborted."""
    model = model_of()
    llm = make_llm(model, draft_len=draft_len, max_rows=5, max_step_tokens=64)
    script, generator = Script().install(llm), random.Random(draft_len)
    expected = oracle(model, prompt_of(17), SEEDED)
    row = row_of(llm, prompt_of(17), SEEDED)
    script.add(row, expected.output_token_ids, cycle(1, draft_len, 0, 2, offset=draft_len))
    others = []
    for place in range(9):
        seed = None if place % 3 else 100 + place
        params = SamplingParams(temperature=1.2, seed=seed, max_tokens=4 + 3 * place, ignore_eos=True)
        (other,) = llm.rows_of(list(prompt_of(5 + 13 * place)), params)
        others.append(script.add(other, [generator.randrange(97) for _ in range(60)], cycle(draft_len)))
    for one in [*others[: draft_len % 4], row, *others[draft_len % 4 :]]:
        llm.engine.add([one])
    beside: set[frozenset] = set()

    def change(step: int) -> None:
        if row.slot is not None:
            beside.add(frozenset(id(other) for other in llm.engine.scheduler.running if other is not row))
        running = [other for other in others if other.slot is not None and other.output_token_ids]
        if step % 4 == 3 and running:
            llm.engine.abort(running[0].request.request_id)

    steps = drive(llm, after_step=change)
    assert len(beside) >= 3 and any(other.finish_reason is FinishReason.ABORT for other in others)
    assert answer(row) == answer(expected)
    happened = [(a.num_drafts, a.num_emitted - 1) for a in of_row(steps, row) if a.num_drafts]
    assert (max(right for _, right in happened) >= min(draft_len, 2)) if draft_len else not happened
    # Only the chosen row's script knows the truth; drafts that the token budget cut off were not fed.
    assert all(right == min(fed, told) for (fed, right), (_, told) in zip(happened, script.of(row), strict=True))


def test_choices_of_one_seed():
    """n=4 draw from streams of their own, and drafts change none of them."""
    model = model_of()
    params = SamplingParams(n=4, temperature=1.0, seed=42, max_tokens=20, ignore_eos=True, logprobs=1)
    plain, llm = make_llm(model, speculate="none"), make_llm(model, draft_len=3)
    expected = plain.rows_of(list(prompt_of(17)), params)
    plain.engine.add(expected)
    drive(plain)
    assert len({tuple(row.output_token_ids) for row in expected}) == 4
    script, rows = Script().install(llm), llm.rows_of(list(prompt_of(17)), params)
    for row, alone in zip(rows, expected, strict=True):
        script.add(row, alone.output_token_ids, cycle(0, 3, 1, 2, offset=row.choice))
    llm.engine.add(rows)
    steps = drive(llm)
    assert [answer(row) for row in rows] == [answer(row) for row in expected]
    assert_dictated(script, steps, rows)


def test_unseeded_requests_differ():
    llm = make_llm(model_of(), draft_len=2)
    script, rows = Script().install(llm), []
    for _ in range(40):
        row = row_of(llm, prompt_of(17), SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True))
        rows.append(script.add(row, [9] * 8, cycle(2)))
        llm.engine.add([row])
    drive(llm)
    assert len({tuple(row.output_token_ids) for row in rows}) > 30


def test_min_tokens_beside_rows_without_drafts():
    """Field case 31: a stop id is banned up to output index min_tokens and no further, drafts or not."""
    model = model_of()
    free = oracle(model, prompt_of(17), GREEDY).output_token_ids
    stop = free[2]
    assert stop not in free[:2]
    llm = make_llm(model, max_rows=16, draft_len=4)
    script, rows, expected = Script().install(llm), [], []
    for min_tokens in range(7):
        params = greedy(max_tokens=12, min_tokens=min_tokens, stop_token_ids=[stop])
        expected.append(oracle(model, prompt_of(17), params))
        # What follows the stop is never emitted; drafts reach beyond it all the same.
        beyond = [*expected[-1].output_token_ids, *free[:12]]
        row = row_of(llm, prompt_of(17), params)
        rows.append(script.add(row, beyond, cycle(4, 1, 3, offset=min_tokens)))
        (neighbour,) = llm.rows_of(list(prompt_of(20 + min_tokens)), greedy(max_tokens=14, draft_len=0))
        llm.engine.add([neighbour])
        llm.engine.add([row])
    steps = drive(llm)
    assert any({bool(a.num_drafts) for a in step} == {True, False} for step in steps)
    lengths = [len(row.output_token_ids) for row in expected]
    assert lengths[:3] == [3, 3, 3] and min(lengths[3:]) > 3
    for min_tokens, row in enumerate(expected):
        assert stop not in row.output_token_ids[:min_tokens]
    assert [answer(row) for row in rows] == [answer(row) for row in expected]


OPTIONS = {
    "plain": {},
    "min_p": {"temperature": 1.5, "min_p": 0.2},
    "top_p": {"temperature": 1.5, "top_p": 0.5},
    "top_k": {"temperature": 1.5, "top_k": 4},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.9},
    "frequency": {"frequency_penalty": 1.2},
    "bias": {"logit_bias": {7: 4.0, 11: 3.5, 13: -100.0}},
    "allowed": {"allowed_token_ids": tuple(range(5, 30))},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(2, 90, 2))},
    "all": {"temperature": 1.3, "min_p": 0.05, "top_p": 0.9, "top_k": 30, "repetition_penalty": 1.3,
            "frequency_penalty": 0.5, "presence_penalty": -0.7, "logit_bias": {9: 2.0}},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_every_option_at_every_verify_position(kind):
    """Field case 32: an option with drafts does what it does without, at each place of a run, bad words included.

    Every other row drafts what the model would say without the option: a verify that forgot it would accept that.
    """
    model, lures = model_of(), 0
    base = greedy(max_tokens=18) if kind == "greedy" else greedy(max_tokens=18, temperature=1.0, seed=3)
    free = oracle(model, prompt_of(17), replace(base, max_tokens=30)).output_token_ids
    llm = make_llm(model, max_rows=26, draft_len=4)
    script, rows, expected = Script().install(llm), [], []
    words = ((free[4],), (free[7], free[8]), (*prompt_of(17)[-1:], free[0]))
    cases = [(options, ()) for options in OPTIONS.values()] + [({}, words)]
    for options, bad_words in cases:
        if kind == "greedy":
            options = {name: value for name, value in options.items() if name != "temperature"}
        params = replace(base, **options)
        edits = (("bad_words", BadWords.of(bad_words)),)
        alone = oracle(model, prompt_of(17), params, None, edits)
        for drafts, pattern in ((alone.output_token_ids, cycle(4, 2, 3, 0, 1)), (free, cycle(4))):
            row = row_of(llm, prompt_of(17), params, edits)
            rows.append(script.add(row, [*drafts, *free], pattern))
            expected.append(alone)
            llm.engine.add([row])
        lures += alone.output_token_ids != free[: len(alone.output_token_ids)]
    steps = drive(llm)
    assert lures >= (8 if kind == "greedy" else 10), "options that change no token test nothing"
    assert [answer(row) for row in rows] == [answer(row) for row in expected]
    assert any(right == 4 for row in rows[2::2] for _, right in script.of(row))
    assert {a.num_emitted for step in steps for a in step} >= {1, 2, 3, 4, 5}


def test_context_limit_in_mid_draft():
    """Field case 37: near the end of the context rows draft less, and stop at exactly 64 tokens beside a roomy row."""
    model, lengths = model_of(), (57, 58, 59, 60, 61, 62, 63, 10)
    llm = make_llm(model, max_model_len=64, draft_len=5)
    script, rows, expected = Script().install(llm), [], []
    for place, length in enumerate(lengths):
        alone = oracle(model, prompt_of(length), greedy(max_tokens=64 - length))
        row = row_of(llm, prompt_of(length), greedy(max_tokens=None))
        rows.append(script.add(row, alone.output_token_ids, cycle(5, 1, 3, offset=place)))
        expected.append(alone)
        llm.engine.add([row])
    steps = drive(llm)
    # The last of 64 tokens is never fed: 63 positions are all that can be used, and all are.
    assert max(a.end for step in steps for a in step) == 63
    for row, alone, length in zip(rows, expected, lengths, strict=True):
        assert row.num_tokens == 64 and row.finish_reason is FinishReason.LENGTH
        assert (row.output_token_ids, row.logprobs) == (alone.output_token_ids, alone.logprobs)
        assert all(a.num_drafts <= 64 - length - 1 for a in of_row(steps, row))
    assert all(any(a.num_drafts == 5 for a in of_row(steps, row)) for row in (rows[0], rows[7]))


def test_token_budget_cuts_drafts_not_tokens():
    """More drafts than max_step_tokens has room for: some are dropped, every row still gets its last token fed."""
    model = model_of()
    llm = make_llm(model, draft_len=5, max_rows=6, max_step_tokens=16)
    script, rows, expected = Script().install(llm), [], []
    for place in range(6):
        params = greedy(max_tokens=20)
        expected.append(oracle(model, prompt_of(2, place), params))
        row = row_of(llm, prompt_of(2, place), params)
        rows.append(script.add(row, expected[-1].output_token_ids, cycle(5, 2, offset=place)))
        llm.engine.add([row])
    steps = drive(llm)
    full = [step for step in steps if len([a for a in step if a.verifies]) == 6]
    assert full and all(sum(a.end - a.start for a in step) <= 16 for step in steps)
    assert any(sum(a.num_drafts for a in step) == 10 and min(a.num_drafts for a in step) == 0 for step in full)
    assert [answer(row) for row in rows] == [answer(row) for row in expected]


def test_drafts_fit_into_a_chunk():
    """A request may ask for more drafts than one row may bring into a forward: it gets what fits."""
    model, params = model_of(), greedy(max_tokens=40, draft_len=20)
    llm = make_llm(model, max_chunk=9)
    script = Script().install(llm)
    row = row_of(llm, prompt_of(17), params)
    expected = oracle(model, prompt_of(17), params)
    script.add(row, expected.output_token_ids, cycle(20, 3))
    llm.engine.add([row])
    steps = drive(llm)
    assert max(a.num_drafts for a in of_row(steps, row)) == 8
    assert answer(row) == answer(expected)
