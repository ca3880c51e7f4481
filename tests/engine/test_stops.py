"""A row ends exactly where plain decoding ends it, wherever that falls in an accepted run; a bad row ends alone."""

import copy
import functools
from dataclasses import replace

import pytest
import tokenizers
from speculation_support import (
    GREEDY,
    Script,
    answer,
    cycle,
    drive,
    make_llm,
    model_of,
    of_row,
    oracle,
    prompt_of,
    row_of,
)

from polytempo.tokenizer import Tokenizer
from polytempo.types import FinishReason, SamplingParams

PROMPT = prompt_of(17)
NEIGHBOUR = prompt_of(126)
FREE = replace(GREEDY, max_tokens=45)
"""Alone and unended: what scripts draft from."""


@functools.cache
def two_letters() -> Tokenizer:
    """A text of two letters for each of the 97 ids."""
    pieces = [first + second for first in "abcdefghijklmnopqrst" for second in "vwxyz"][:97]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({piece: i for i, piece in enumerate(pieces)}, "av"))
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend)


def free_tokens(count: int = 40) -> list[int]:
    """What the prompt's greedy row emits if nothing ends it."""
    return oracle(model_of(), PROMPT, FREE).output_token_ids[:count]


def first_seen_from(place: int) -> int:
    """The first output index from `place` on whose token did not occur before."""
    tokens = free_tokens()
    return next(i for i in range(place, 40) if tokens[i] not in tokens[:i])


def run_at_every_offset(params, stop_at: int, edits=(), tokenizer=None):
    """Rows of one request whose output index `stop_at` is at each offset of an accepted run: (rows, steps, oracle).

    The run that holds it has right drafts only; the verify before it accepted as many as bring it there. A neighbour
    that goes on runs beside.
    """
    draft_len = stop_at - 2
    assert 5 <= draft_len <= 8
    model = model_of()
    llm = make_llm(model, tokenizer, draft_len=draft_len, max_rows=10)
    script = Script().install(llm)
    expected = oracle(model, PROMPT, params, tokenizer, edits)
    offsets = list(range(draft_len + 1))
    rows = []
    for offset in offsets:
        row = row_of(llm, PROMPT, params, edits)
        before = stop_at - offset - 2
        script.add(row, free_tokens(), lambda place, most, before=before: (most, most if place else min(before, most)))
        rows.append(row)
        llm.engine.add([row])
    beside = row_of(llm, NEIGHBOUR, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2))
    script.add(beside, oracle(model, NEIGHBOUR, FREE).output_token_ids, cycle(1, 3, 0, 2))
    llm.engine.add([beside])
    steps = drive(llm)
    assert beside.output_token_ids == oracle(model, NEIGHBOUR, FREE).output_token_ids[:30]
    for offset, row in zip(offsets, rows, strict=True):
        last = of_row(steps, row)[-1]
        assert last.num_emitted == offset + 1, "the stop is not where the test wants it"
        assert answer(row) == answer(expected), f"offset {offset} of the run"
        assert len(row.logprobs) == len(row.output_token_ids) == stop_at + 1
    return rows, steps, expected


def test_eos_at_every_offset():
    """Field case 22: EOS as 1st … 5th accepted draft and as bonus token ends the output there, counted once."""
    stop_at = first_seen_from(7)
    eos = free_tokens()[stop_at]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
    rows, steps, expected = run_at_every_offset(params, stop_at, (("stop_token_ids", frozenset({eos})),))
    assert expected.finish_reason is FinishReason.STOP and expected.stop_reason is None
    assert expected.output_token_ids == free_tokens()[: stop_at + 1]
    lasts = [of_row(steps, row)[-1] for row in rows]
    assert {last.num_emitted for last in lasts} == set(range(1, stop_at))
    assert {last.num_drafts for last in lasts} == {stop_at - 2}
    cut = [row for row, last in zip(rows, lasts, strict=True) if last.num_emitted <= last.num_drafts]
    for row in cut:
        assert row.stats.num_accepted > len(row.output_token_ids) - row.stats.num_verifies, "counted before trimming"


def test_stop_id_at_every_offset():
    stop_at = first_seen_from(7)
    stop = free_tokens()[stop_at]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=[stop], logprobs=2)
    _, _, expected = run_at_every_offset(params, stop_at)
    assert (expected.finish_reason, expected.stop_reason) == (FinishReason.STOP, stop)


def test_max_tokens_at_every_offset():
    """The run never passes max_tokens: drafts stop where their tokens could not be used."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
    rows, steps, expected = run_at_every_offset(params, 7)
    assert expected.finish_reason is FinishReason.LENGTH
    assert all(of_row(steps, row)[-1].num_drafts == of_row(steps, row)[-1].num_emitted - 1 for row in rows)


def text_of(tokens) -> str:
    return two_letters().decode(tokens)


def test_tokenizer_of_the_fixture():
    assert text_of([0, 1, 96]) == "avawtw" and len(text_of(free_tokens())) == 80


@pytest.mark.parametrize("keeps", [False, True], ids=["cut", "kept"])
@pytest.mark.parametrize(("begin", "length"), [(0, 2), (1, 2), (0, 1), (-1, 3), (-2, 4), (-3, 4), (-5, 6)])
def test_stop_string_at_every_offset(begin, length, keeps):
    """Field case 24: a stop string inside one token of a run, over two, and begun in the run before."""
    text = text_of(free_tokens())
    # The first place whose letters did not occur before: that is then where they stop the output.
    starts = (2 * place + begin for place in range(7, 40))
    start = next(i for i in starts if text.index(text[i : i + length]) == i and i + length > 14)
    stop, stop_at = text[start : start + length], (start + length - 1) // 2
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=[stop], logprobs=2,
                            include_stop_str_in_output=keeps)  # fmt: skip
    rows, _, expected = run_at_every_offset(params, stop_at, tokenizer=two_letters())
    assert (expected.finish_reason, expected.stop_reason) == (FinishReason.STOP, stop)
    assert expected.text.text == text[: start + (length if keeps else 0)]
    assert len(rows) >= 6


def test_two_stop_strings_of_one_run():
    """Field case 24: both come in one run; the earlier one ends the text, though listed last."""
    text, stop_at = text_of(free_tokens()), first_seen_from(7)
    early, late = text[2 * stop_at : 2 * stop_at + 2], text[2 * stop_at + 3 : 2 * stop_at + 6]
    assert text.index(early) == 2 * stop_at < text.index(late)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=[late, early], logprobs=2)
    _, _, expected = run_at_every_offset(params, stop_at, tokenizer=two_letters())
    assert expected.stop_reason == early and expected.text.text == text[: 2 * stop_at]


@pytest.mark.parametrize("winner", ["eos", "stop string", "max_tokens"])
def test_stops_of_all_kinds_in_one_run(winner):
    """EOS, a stop string and max_tokens at neighbouring tokens of one run: the first one ends it and is the reason."""
    tokens, first = free_tokens(), first_seen_from(7)
    text, second = text_of(tokens), first_seen_from(first + 1)
    places = {"eos": (first, second), "stop string": (second, first), "max_tokens": (second, second)}[winner]
    eos_at, text_at = places
    stop = text[2 * text_at : 2 * text_at + 2]
    assert text.index(stop) == 2 * text_at and first < second <= 10
    stop_at = {"eos": eos_at, "stop string": text_at, "max_tokens": first}[winner]
    params = SamplingParams(temperature=0.0, max_tokens=first + 1 if winner == "max_tokens" else 40, ignore_eos=True,
                            stop=[stop], logprobs=2)  # fmt: skip
    edits = (("stop_token_ids", frozenset({tokens[eos_at]})),)
    _, _, expected = run_at_every_offset(params, stop_at, edits, two_letters())
    reason = (FinishReason.LENGTH, None) if winner == "max_tokens" else (
        FinishReason.STOP, stop if winner == "stop string" else None)  # fmt: skip
    assert (expected.finish_reason, expected.stop_reason) == reason


def test_stop_id_and_max_tokens_at_the_same_token():
    """Both say stop at one token: the stop id is the reason, alone and at every offset."""
    stop_at = first_seen_from(7)
    stop = free_tokens()[stop_at]
    params = SamplingParams(temperature=0.0, max_tokens=stop_at + 1, ignore_eos=True, stop_token_ids=[stop], logprobs=2)
    _, _, expected = run_at_every_offset(params, stop_at)
    assert (expected.finish_reason, expected.stop_reason) == (FinishReason.STOP, stop)


def test_slot_after_a_stop_is_as_new():
    """Field case 22: what was accepted past EOS is not in the way of the seat's next owner."""
    model, stop_at = model_of(), first_seen_from(7)
    llm = make_llm(model, draft_len=5, max_rows=1)
    script = Script().install(llm)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    follow_up = (*PROMPT, *free_tokens()[: stop_at + 1], 5, 6)
    rows = []
    for prompt, edits in ((PROMPT, (("stop_token_ids", frozenset({free_tokens()[stop_at]})),)), (follow_up, ())):
        rows.append(row_of(llm, prompt, params, edits))
        known = free_tokens() if prompt is PROMPT else oracle(model, prompt, params).output_token_ids
        script.add(rows[-1], known, cycle(5))
        llm.engine.add([rows[-1]])
    drive(llm)
    assert len(rows[0].output_token_ids) == stop_at + 1
    assert answer(rows[1]) == answer(oracle(model, follow_up, params))


# --- bad rows -----------------------------------------------------------------------------------------------


def with_nan_embedding(token_id: int):
    """The model, but whatever is fed this token gets logits that are not finite."""
    model = copy.deepcopy(model_of())
    model.embed.weight[token_id] = float("nan")
    return model


@functools.cache
def healthy(kernels: str):
    """The model on one path of kernels."""
    return model_of().with_kernels(kernels)


def neighbours_of(llm, script, bad_id: int, kernels: str = "auto"):
    """Three rows that never meet the bad token, with scripts; and what each is alone on the healthy model."""
    pairs, params = [], replace(GREEDY, max_tokens=24)
    for length in range(20, 60, 3):
        alone = oracle(healthy(kernels), prompt_of(length), params)
        # Nor may a wrong draft of theirs be the bad token.
        near = {(token + distance) % 97 for token in alone.output_token_ids for distance in range(6)}
        if bad_id not in {*prompt_of(length), *near}:
            row = row_of(llm, prompt_of(length), params)
            pairs.append((script.add(row, alone.output_token_ids, cycle(1, 0, 3, 2, offset=length)), alone))
        if len(pairs) == 3:
            return pairs
    raise AssertionError("every candidate meets the bad token")


@pytest.mark.parametrize("before", range(4))
def test_non_finite_logits_inside_a_run(before):
    """The row ends with an error after the tokens that plain decoding gives too; neighbours are untouched."""
    place = first_seen_from(7)
    bad_id = free_tokens()[place]
    assert bad_id not in PROMPT
    model = with_nan_embedding(bad_id)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2)
    expected = oracle(model, PROMPT, params)
    assert expected.finish_reason is FinishReason.ERROR and "not finite" in expected.error
    assert expected.output_token_ids == free_tokens()[: place + 1]
    llm = make_llm(model, draft_len=5)
    script = Script().install(llm)
    bad = row_of(llm, PROMPT, params)
    known = [*free_tokens(place + 1), *[7] * 20]
    script.add(bad, known, lambda asked, most: (most, most if asked else min(before, most)))
    pairs = neighbours_of(llm, script, bad_id)
    for row in (pairs[0][0], bad, pairs[1][0], pairs[2][0]):
        llm.engine.add([row])
    steps = drive(llm, max_steps=120)
    assert any(a.row is bad and a.num_drafts and a.start <= 17 + place < a.end for step in steps for a in step)
    assert (bad.output_token_ids, bad.logprobs) == (expected.output_token_ids, expected.logprobs)
    assert (bad.finish_reason, bad.error) == (expected.finish_reason, expected.error)
    for row, alone in pairs:
        assert row.output_token_ids == alone.output_token_ids and row.logprobs == alone.logprobs


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_rejected_draft_that_breaks_the_forward(kernels):
    """A wrong draft whose own state is NaN must not end a healthy row: the target never emits that token.

    In torch masked keys of its block are spoiled (0 · NaN) and the row starts over; the kernels never read them.
    """
    bad_id = next(i for i in range(96, 1, -1) if i not in (*PROMPT, *free_tokens(30)))
    model = with_nan_embedding(bad_id).with_kernels(kernels)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    expected = oracle(model, PROMPT, params)
    assert expected.finish_reason is FinishReason.LENGTH
    llm = make_llm(model, draft_len=3)
    script = Script().install(llm)
    row = row_of(llm, PROMPT, params)
    wrong_at = [*free_tokens(30)]
    wrong_at[5] = wrong_at[11] = wrong_at[14] = bad_id
    script.add(row, wrong_at, cycle(3))
    llm.engine.add([row])
    drive(llm, max_steps=60)
    assert answer(row) == answer(expected)
    assert row.request.prompt_logprobs == expected.request.prompt_logprobs and len(row.request.prompt_logprobs) == 17
    assert row.stats.num_accepted > 8


def test_a_row_that_starts_over_fails_without_drafts():
    """Its last chunk ends before its last token, so that it could draft there: it started over for ever."""
    place = first_seen_from(7)
    bad_id = free_tokens()[place]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    llm = make_llm(with_nan_embedding(bad_id), draft_len=3, max_chunk=len(PROMPT) + place)
    script = Script().install(llm)
    bad = row_of(llm, PROMPT, params)
    script.add(bad, [*free_tokens(place + 1), *[7] * 20], cycle(3))
    llm.engine.add([bad])
    steps = drive(llm, max_steps=60)
    assert any(item.start == 0 and step is not steps[0] for step in steps for item in step), "it starts over"
    assert bad.finish_reason is FinishReason.ERROR and bad.output_token_ids == free_tokens()[: place + 1]


@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "drafts"])
def test_cohort_goes_on_when_a_row_fails(speculate):
    """In COHORT a row without a token must not hold the others at 0 for ever."""
    place = first_seen_from(7)
    bad_id = free_tokens()[place]
    model = with_nan_embedding(bad_id)
    llm = make_llm(model, draft_len=3 if speculate else 0, kv_advance="cohort")
    script = Script().install(llm)
    bad = row_of(llm, PROMPT, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    script.add(bad, [*free_tokens(place + 1), *[7] * 20], cycle(3))
    pairs = neighbours_of(llm, script, bad_id)
    for row in (bad, *(row for row, _ in pairs)):
        llm.engine.add([row])
    drive(llm, max_steps=120)
    assert bad.finish_reason is FinishReason.ERROR and bad.output_token_ids == free_tokens()[: place + 1]
    for row, alone in pairs:
        assert row.output_token_ids == alone.output_token_ids


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_seat_of_a_failed_row_is_clean(kernels):
    """Whatever a failed row left in its seat, the next owner's output is as on a new engine."""
    place = first_seen_from(7)
    llm = make_llm(with_nan_embedding(free_tokens()[place]).with_kernels(kernels), draft_len=3, max_rows=1)
    script = Script().install(llm)
    bad = row_of(llm, PROMPT, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    script.add(bad, [*free_tokens(place + 1), *[7] * 20], cycle(3))
    llm.engine.add([bad])
    pairs = neighbours_of(llm, script, free_tokens()[place], kernels)
    for row, _ in pairs:
        llm.engine.add([row])
    drive(llm)
    assert bad.finish_reason is FinishReason.ERROR
    assert [answer(row) for row, _ in pairs] == [answer(alone) for _, alone in pairs]
