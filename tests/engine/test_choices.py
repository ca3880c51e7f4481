"""The choices of one request read its prompt once, and each is the request alone, bit for bit."""

from dataclasses import replace

import pytest
import torch
from speculation_support import GREEDY, answer, drive, make_llm, model_of, oracle, prompt_of

from polytempo.cache.layout import StateShape
from polytempo.types import SamplingParams

SAMPLED = SamplingParams(n=4, temperature=1.0, seed=42, max_tokens=12, ignore_eos=True, logprobs=1)


def choices(llm, prompt, params):
    """All rows of one request, queued."""
    rows = llm.rows_of(list(prompt), params)
    llm.engine.add(rows)
    return rows


def alone(model, prompt, params):
    """Every choice by itself: an engine whose only row it is, without drafts, so that it reads the whole prompt."""
    expected = []
    for choice in range(params.n):
        llm = make_llm(model, speculate="none", max_rows=1)
        row = llm.rows_of(list(prompt), params)[choice]
        llm.engine.add([row])
        drive(llm)
        assert llm.engine.sharing.num_rows == 0
        expected.append(answer(row))
    return expected


def fed_tokens(llm):
    """A list to which every step appends (slot, start, end) of what it fed."""
    fed, plan = [], llm.engine.scheduler.plan

    def recorded():
        planned = plan()
        fed.extend((item.row, item.segment.start, item.segment.end - item.num_drafts) for item in planned)
        return planned

    llm.engine.scheduler.plan = recorded
    return fed


@pytest.mark.parametrize("draft_len", [0, 3])
@pytest.mark.parametrize("max_chunk", [1, 9, 96])
@pytest.mark.parametrize("length", [1, 2, 3, 17, 128, 131, 300])
def test_the_prompt_is_read_once(length, max_chunk, draft_len):
    if max_chunk == 1 and (draft_len or length > 20):
        max_chunk = 4
    model, prompt = model_of(), prompt_of(length)
    llm = make_llm(model, max_chunk=max_chunk, draft_len=draft_len)
    fed = fed_tokens(llm)
    rows = choices(llm, prompt, SAMPLED)
    drive(llm)
    assert [answer(row) for row in rows] == alone(model, prompt, SAMPLED)
    before_last = [start for _, start, end in fed for start in range(start, min(end, length - 1))]
    assert sorted(before_last) == list(range(length - 1))
    sharing = llm.engine.sharing
    assert (sharing.num_rows, sharing.num_tokens) == ((3, 3 * (length - 1)) if length > 1 else (0, 0))
    assert sharing.num_kept == 0 and [row.num_cached for row in rows] == [0] * 4


@pytest.mark.parametrize("max_rows", [1, 2, 3])
@pytest.mark.parametrize("prefix_cache", [0, 2**24])
def test_choices_that_wait_for_a_seat(max_rows, prefix_cache):
    """Those without a seat when the prompt has been read find a copy, which is dropped behind the last of them."""
    model, prompt = model_of(), prompt_of(200)
    params = replace(SAMPLED, n=7)
    llm = make_llm(model, max_rows=max_rows, draft_len=2, prefix_cache=prefix_cache)
    fed, kept = fed_tokens(llm), []
    rows = choices(llm, prompt, params)
    other = choices(llm, prompt_of(40), replace(GREEDY, max_tokens=30))
    while llm.engine.has_work:
        llm.engine.step()
        kept.append(llm.engine.sharing.num_kept)
        llm.engine.scheduler.check()
    assert [answer(row) for row in rows] == alone(model, prompt, params)
    assert answer(other[0]) == answer(oracle(model, prompt_of(40), replace(GREEDY, max_tokens=30)))
    read = [place for row, start, end in fed if row in rows for place in range(start, min(end, 199))]
    assert sorted(read) == list(range(199))
    assert max(kept) == 1 and kept[-1] == 0


def test_a_reader_that_ends_at_once():
    """max_tokens 1: the reader has ended before anyone can take its state."""
    model, prompt, params = model_of(), prompt_of(131), replace(SAMPLED, max_tokens=1)
    llm = make_llm(model, draft_len=3)
    rows = choices(llm, prompt, params)
    drive(llm)
    assert [answer(row) for row in rows] == alone(model, prompt, params)
    assert llm.engine.sharing.num_rows == 3


def test_an_ended_reader_leaves_followers_that_draft():
    """The first choice ends with its first token, the others draft on, over MTP keys that they make themselves."""
    model, prompt = model_of(), prompt_of(131)
    expected = alone(model, prompt, SAMPLED)
    first = {tokens[0] for tokens, *_ in expected[1:]}
    stop = expected[0][0][0]
    assert stop not in {token for tokens, *_ in expected[1:] for token in tokens[:3]} and first
    params = replace(SAMPLED, stop_token_ids=(stop,))
    llm = make_llm(model, draft_len=3)
    rows = choices(llm, prompt, params)
    drive(llm)
    assert len(rows[0].output_token_ids) == 1 and all(len(row.output_token_ids) > 3 for row in rows[1:])
    assert [answer(row) for row in rows] == alone(model, prompt, params)
    assert llm.engine.sharing.num_rows == 3 and sum(row.stats.num_drafted for row in rows) > 0


def test_an_aborted_or_set_back_reader_is_followed_by_another():
    model, prompt = model_of(), prompt_of(300)
    llm = make_llm(model, max_chunk=50, draft_len=2)
    rows = choices(llm, prompt, SAMPLED)
    llm.engine.step()
    assert [row.kv_len for row in rows] == [50, 0, 0, 0]
    scheduler = llm.engine.scheduler
    scheduler.running.append(scheduler.running.pop(0))  # now the youngest
    scheduler._set_back_one()
    assert rows[0].slot is None
    drive(llm)
    assert [answer(row) for row in rows] == alone(model, prompt, SAMPLED)
    assert llm.engine.sharing.num_rows == 3


@pytest.mark.parametrize("memory", [1.3, 2.2, 3.5])
def test_too_little_memory_for_all(memory):
    """Rows are set back, copies do not fit; the tokens stay the same and every choice ends."""
    from test_memory import memory_for

    model, prompt, params = model_of(), prompt_of(300), replace(SAMPLED, n=5, max_tokens=150)
    llm = make_llm(model, draft_len=2, memory=memory_for(memory, 8))
    rows = choices(llm, prompt, params)
    drive(llm)
    assert [answer(row) for row in rows] == alone(model, prompt, params)
    llm.engine.scheduler.check()
    assert llm.engine.sharing.num_kept == 0


def test_a_choice_that_is_set_back_late_takes_nobody_s_state():
    """Its neighbour has gone further than any rewind: keys of the prompt's last window are overwritten there."""
    model, prompt = model_of(), prompt_of(131)
    params = replace(SAMPLED, n=2, max_tokens=100)
    llm = make_llm(model, max_chunk=8)
    rows = choices(llm, prompt, params)
    while rows[0].num_tokens < 131 + 90:
        llm.engine.step()
    assert llm.engine.sharing.num_rows == 1
    llm.engine.scheduler._set_back_one()
    drive(llm)
    assert rows[1].num_set_back == 1 and llm.engine.sharing.num_rows == 1
    assert [answer(row) for row in rows] == alone(model, prompt, params)


def test_a_reader_that_failed_is_not_followed():
    """Whatever spoilt its state, the others read the prompt themselves."""
    model, prompt = model_of(), prompt_of(131)
    llm = make_llm(model, draft_len=2, max_chunk=100)
    rows = choices(llm, prompt, SAMPLED)
    llm.engine.step()
    assert [row.kv_len for row in rows] == [100, 0, 0, 0]
    for layer in llm.engine.target.store.layers:
        for tensor in layer.per_slot():
            tensor[rows[0].slot] = float("nan")
    drive(llm)
    assert "not finite" in rows[0].error and llm.engine.sharing.num_rows == 2
    assert [answer(row) for row in rows[1:]] == alone(model, prompt, SAMPLED)[1:]


def test_neighbours_take_the_blocks_that_a_copy_needs():
    """They grow while the prompt is read: the second choice finds too few and reads it itself when they have ended."""
    model, prompt, params = model_of(), prompt_of(300), replace(SAMPLED, n=2)
    limits = {"max_rows": 3, "max_chunk": 20}
    unbounded = make_llm(model, **limits).engine
    ratios = unbounded.target.store.pool.ratios
    blocks = {4: 1 + 5, 128: 1 + 3}  # NULL_BLOCK, and what three rows need as they are admitted
    memory = 3 * StateShape.build(model.config, unbounded.config).slot_bytes(4)
    memory += sum(ratios[ratio].block_bytes * count for ratio, count in blocks.items())
    llm = make_llm(model, memory=memory, **limits)
    neighbour = choices(llm, prompt_of(250), replace(GREEDY, max_tokens=60))[0]
    while not neighbour.output_token_ids:
        llm.engine.step()
    rows = choices(llm, prompt, params)
    while rows[0].is_reading_prompt:
        llm.engine.step()
        assert rows[1].slot is not None and rows[1].kv_len == 0
    drive(llm)
    assert llm.engine.sharing.num_rows == 0 and sum(row.num_set_back for row in (neighbour, *rows)) == 0
    assert [answer(row) for row in rows] == alone(model, prompt, params)
    assert answer(neighbour) == answer(oracle(model, prompt_of(250), replace(GREEDY, max_tokens=60)))


def test_prompt_logprobs_of_a_reader_that_starts_over():
    """The second reading cuts the prompt elsewhere; every position is written once."""
    model, prompt = model_of(), prompt_of(131)
    params = replace(SAMPLED, n=2, prompt_logprobs=1)
    llm = make_llm(model, max_chunk=50)
    rows = choices(llm, prompt, params)
    llm.engine.step()
    llm.engine.step()
    llm.engine.scheduler._set_back_one()
    llm.engine.scheduler._set_back_one()
    llm.engine.scheduler.config = replace(llm.engine.config, max_chunk=33)
    drive(llm)
    written = rows[0].request.prompt_logprobs
    plain = make_llm(model, max_rows=1)
    expected = choices(plain, prompt, replace(params, n=1))[0].request
    drive(plain)
    assert len(written) == 131 and written == expected.prompt_logprobs


def test_left_aligned_reads_for_every_choice():
    model, prompt = model_of(), prompt_of(60)
    llm = make_llm(model, kv_layout="left_aligned", draft_len=0)
    fed = fed_tokens(llm)
    rows = choices(llm, prompt, replace(SAMPLED, n=3))
    llm.engine.step()
    assert [row.kv_len for row in rows] == [60] * 3, "a choice waited for a state that nobody gives it"
    drive(llm)
    assert llm.engine.sharing is None and all(len(row.output_token_ids) == 12 for row in rows)
    assert sum(start == 0 for _, start, _ in fed) == 3


def first_drafts(llm, rows, pauses):
    """The first drafts of each choice; choice c gets none before pauses[c] output tokens are out."""
    lengths, drafts = llm.engine.policy.lengths, {}

    def paused(rows):
        waits = [len(row.output_token_ids) < pauses[row.choice] for row in rows]
        return [0 if waits_now else count for waits_now, count in zip(waits, lengths(rows), strict=True)]

    llm.engine.policy.lengths = paused
    llm.engine.add(rows)
    while llm.engine.has_work:
        llm.engine.step()
        drafts |= {row.choice: row.drafts for row in rows if row.drafts and row.choice not in drafts}
    return drafts


NEVER = 1000


@pytest.mark.parametrize(("pauses", "max_rows"), [
    ((0, 0, 0), 8), ((0, 3, 3), 8), ((3, 3, 3), 8), ((NEVER, 3, 3), 1), ((NEVER, 0, 3), 2),
])  # fmt: skip
@pytest.mark.parametrize("length", [2, 3, 131, 300])
def test_followers_have_the_keys_to_draft_as_if_they_had_read(length, pauses, max_rows):
    """The first drafts of a choice are those that it makes after reading the prompt itself, at once or later.

    Later, it needs the key of the prompt's last token, which the reader made with its own first token, not this one's;
    and all keys of the prompt's last window, if the reader did not draft either.
    """
    model, prompt = model_of(), prompt_of(length)
    params = replace(SAMPLED, n=3)
    llm = make_llm(model, draft_len=3, max_rows=max_rows)
    drafts = first_drafts(llm, llm.rows_of(list(prompt), params), pauses)
    assert llm.engine.sharing.num_rows == 2
    assert {choice: len(made) for choice, made in drafts.items()} == {c: 3 for c in range(3) if pauses[c] < NEVER}
    for choice in drafts:
        single = make_llm(model, draft_len=3, max_rows=1)
        assert drafts[choice] == first_drafts(single, [single.rows_of(list(prompt), params)[choice]], pauses)[choice]


def keys_at_first_draft(llm, rows):
    """Keys of the MTP block that each choice drafts from when it drafts first, after its third token."""
    engine, found = llm.engine, {}
    engine.policy.lengths = lambda running: [3 if len(row.output_token_ids) == 3 else 0 for row in running]
    while engine.has_work:
        engine.step()
        for row in rows:
            if row.drafts and row.choice not in found:
                (layer,) = engine.target.store.mtp
                window = engine.target.model.config.sliding_window
                positions = range(max(0, row.kv_len - window), row.kv_len)
                found[row.choice] = layer.window[row.slot, [p % layer.window.shape[1] for p in positions]].clone()
    return found


@pytest.mark.parametrize("max_rows", [1, 2, 4])
@pytest.mark.parametrize("length", [3, 20, 131])
def test_followers_of_a_reader_that_did_not_draft_have_its_streams(length, max_rows):
    """Streams that were only noted were missing from copies, and the notes of a seat's last owner landed on them."""
    model, prompt, params = model_of(), prompt_of(length), replace(SAMPLED, max_tokens=9)
    llm = make_llm(model, draft_len=3, max_rows=max_rows)
    found = keys_at_first_draft(llm, choices(llm, prompt, params))
    assert len(found) == params.n and llm.engine.sharing.num_rows == 3
    for choice in range(params.n):
        single = make_llm(model, draft_len=3, max_rows=1)
        row = single.rows_of(list(prompt), params)[choice]
        single.engine.add([row])
        assert torch.equal(found[choice], keys_at_first_draft(single, [row])[choice])


def test_a_request_that_goes_first_takes_no_copy_of_another():
    """A choice waits, its prompt's copy with it, while a more urgent request gets the seat."""
    model, prompt, urgent = model_of(), prompt_of(131), prompt_of(40)
    llm = make_llm(model, max_rows=1)
    rows = choices(llm, prompt, SAMPLED)
    while not llm.engine.sharing.num_kept:
        llm.engine.step()
    first = llm.rows_of(list(urgent), GREEDY, priority=-1)
    llm.engine.add(first)
    drive(llm)
    assert llm.engine.sharing.num_rows == 3
    assert answer(first[0]) == answer(oracle(model, urgent, GREEDY))
    assert [answer(row) for row in rows] == alone(model, prompt, SAMPLED)


def test_an_aborted_request_leaves_no_copy_to_one_of_its_name():
    """Copies were found by the request's name, and dropped no sooner than after the next step."""
    model, long, short = model_of(), prompt_of(131), prompt_of(20)
    llm = make_llm(model, max_rows=2)
    (first, *_) = choices(llm, long, SAMPLED)
    while not llm.engine.sharing.num_kept:
        llm.engine.step()
    llm.engine.abort(first.request.request_id)
    assert llm.engine.sharing.num_kept == 0
    rows = llm.rows_of(list(short), SAMPLED)
    rows[0].request.request_id = first.request.request_id
    llm.engine.add(rows)
    drive(llm)
    assert [answer(row) for row in rows] == alone(model, short, SAMPLED)
