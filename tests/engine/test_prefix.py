"""Prefix reuse: a request that starts from a snapshot is the cold request, bit for bit."""

import copy
from dataclasses import replace

import pytest
import torch
from speculation_support import (
    GREEDY,
    MTPUnderScript,
    Script,
    answer,
    cycle,
    drive,
    make_llm,
    model_of,
    oracle,
    reference_drafts,
    row_of,
)
from support import TINY, random_ids, slot_tensors, visible_cells

from polytempo.cache.snapshot import SPAN
from polytempo.engine_config import EngineConfig
from polytempo.errors import ConfigError
from polytempo.types import FinishReason, SamplingParams

ROOM = 2**24
PARAMS = replace(GREEDY, max_tokens=40)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def run(llm, prompt, params=PARAMS, script=None):
    """One request to its end; its row."""
    row = row_of(llm, prompt, params)
    if script is not None:
        known = oracle(llm.model, tuple(prompt), params).output_token_ids
        script.add(row, [*known, *[5] * 8], cycle(3, 1, 0, 2))
    llm.engine.add([row])
    drive(llm)
    return row


@each_dtype
@pytest.mark.parametrize("max_chunk", [9, 96, 300])
def test_repeated_and_shared_prompts(dtype, max_chunk):
    """Field case 14: a prompt three times, one that shares 200 tokens, and another request between on the same slot."""
    model = model_of(dtype=dtype)
    llm = make_llm(model, max_rows=1, max_chunk=max_chunk, draft_len=3, prefix_cache=ROOM)
    first = tuple(random_ids(300, seed=1))
    sharing = (*first[:200], *random_ids(100, seed=2))
    between = tuple(random_ids(170, seed=3))
    cached = []
    for prompt in (first, first, between, first, sharing, between):
        row = run(llm, prompt)
        assert answer(row) == answer(oracle(model, prompt, PARAMS))
        cached.append(row.num_cached)
    assert cached == [0, 256, 0, 256, 128, 128]
    cache = llm.engine.target.prefix_cache
    assert (cache.num_queries, cache.num_hits, cache.num_cached_tokens) == (6, 4, sum(cached))


@each_dtype
@pytest.mark.parametrize("length", [127, 128, 129, 130, 255, 256, 257, 383, 384, 385])
def test_saved_restored_into_another_slot_and_continued(dtype, length):
    """Field case 16: the boundaries that are held, and one token to either side, with three drafts."""
    model, prompt = model_of(dtype=dtype), tuple(random_ids(length, seed=length))
    llm = make_llm(model, max_rows=2, draft_len=3, prefix_cache=ROOM)
    script = Script().install(llm)
    assert run(llm, prompt, script=script).num_cached == 0
    blocker = row_of(llm, random_ids(3, seed=9), replace(GREEDY, max_tokens=200))
    script.add(blocker, [5] * 300, cycle(0))
    row = row_of(llm, prompt, PARAMS)
    script.add(row, [*oracle(model, prompt, PARAMS).output_token_ids, *[5] * 8], cycle(3, 1, 0, 2))
    llm.engine.add([blocker, row])
    llm.engine.step()
    assert row.slot == 1 and row.num_cached == (length - 1) // SPAN * SPAN
    drive(llm)
    assert answer(row) == answer(oracle(model, prompt, PARAMS))
    assert row.stats.num_accepted > 5


@each_dtype
def test_restored_state_is_the_cold_rows_state(dtype):
    """Everything that later tokens may read, and the MTP block's keys: equal to the bit, right after the restore."""
    model, prompt = model_of(dtype=dtype), random_ids(300, seed=1)
    # Chunks of 72 go past the boundary, so that streams must be taken from within one; steps of 64 end at it.
    limits = {"max_rows": 2, "max_chunk": 72, "prefix_cache": ROOM}
    warm, cold = (make_llm(model, max_step_tokens=most, **limits) for most in (72, 64))
    run(warm, prompt, replace(PARAMS, max_tokens=2))
    # The token after the boundary is another one, and so is the MTP block's key at the boundary's last position.
    prompt = [*prompt[:256], *((token + 1) % TINY.vocab_size for token in prompt[256:])]
    row, other = row_of(warm, prompt, PARAMS), row_of(cold, prompt, PARAMS)
    warm.engine.add([row])
    for seated in warm.engine.scheduler.admit():
        warm.engine.target.store.clear(seated.slot)
        warm.engine._reuse_prefix(seated)
    cold.engine.add([other])
    while other.kv_len < 256:
        cold.engine.step()
    assert (row.kv_len, row.num_cached, other.kv_len) == (256, 256, 256)
    ours, theirs = warm.engine.target.store, cold.engine.target.store
    masks = visible_cells(TINY, ours, {0: 256})
    # Ratio 128 has no open span at a boundary, and reads no input of the one before.
    assert sum(not mask[0].any() for mask in masks) == 2
    for mine, expected, mask in zip(slot_tensors(ours), slot_tensors(theirs), masks, strict=True):
        assert torch.equal(mine[0][mask[0]], expected[0][mask[0]])


def test_drafts_after_a_restore_are_the_cold_rows_drafts():
    """The MTP block's window at the boundary is whole, though the first prompt went on far past it."""
    model, long_prompt = model_of(), tuple(random_ids(390, seed=1))
    short = long_prompt[:130]
    llm = make_llm(model, draft_len=3, prefix_cache=ROOM)
    run(llm, long_prompt, replace(PARAMS, max_tokens=1))
    llm.engine.proposer = spy = MTPUnderScript(llm.engine.target, None)
    row = run(llm, short, replace(PARAMS, max_tokens=12))
    assert row.num_cached == 128
    output = oracle(model, short, PARAMS).output_token_ids
    for (_, _, num_tokens), drafts in spy.proposed.items():
        done = num_tokens - len(short)
        if drafts:
            assert drafts == reference_drafts(model, short, output[:done], PARAMS, len(drafts))
    assert any(len(drafts) == 3 for drafts in spy.proposed.values())


def test_equal_spans_after_other_tokens_are_other_prefixes():
    """The second span of the first and the last prompt holds the same tokens; its state is another one."""
    model = model_of()
    llm = make_llm(model, max_rows=1, prefix_cache=ROOM)
    first, second = (random_ids(128, seed=seed) for seed in (1, 2))
    shared, other = (random_ids(170, seed=seed) for seed in (3, 4))
    for prompt, num_cached in (((*first, *shared), 0), ((*second, *other), 0), ((*second, *shared), 128)):
        row = run(llm, prompt)
        assert row.num_cached == num_cached and answer(row) == answer(oracle(model, prompt, PARAMS))


def test_cold_rows_that_leave_snapshots_draft_as_ever():
    """At a boundary keys are made early, in the middle of a prompt that does not draft yet: all of them."""
    model, prompt = model_of(), tuple(random_ids(300, seed=1))
    llm = make_llm(model, draft_len=3, prefix_cache=ROOM)
    llm.engine.proposer = spy = MTPUnderScript(llm.engine.target, None)
    run(llm, prompt, replace(PARAMS, max_tokens=8))
    # Chunks of 96: the one from 192 to 288 crosses a boundary, and the first draft looks back to 284.
    assert 300 - TINY.sliding_window < 288 < 300
    output = oracle(model, prompt, PARAMS).output_token_ids
    checked = 0
    for (_, _, num_tokens), drafts in spy.proposed.items():
        if drafts:
            assert drafts == reference_drafts(model, prompt, output[: num_tokens - 300], PARAMS, len(drafts))
            checked += 1
    assert checked >= 2
    window = llm.engine.target.store.mtp[0].window[0]
    assert window[287 % len(window)].abs().max() > 0.1, "the last key before the boundary's chunk ended is missing"


def test_output_tokens_are_reused_by_the_next_turn():
    """A conversation's next prompt holds the last answer."""
    model, prompt = model_of(), tuple(random_ids(100, seed=4))
    llm = make_llm(model, draft_len=3, prefix_cache=ROOM)
    script = Script().install(llm)
    first = run(llm, prompt, replace(PARAMS, max_tokens=60), script)
    turn = (*prompt, *first.output_token_ids, *random_ids(20, seed=5))
    second = run(llm, turn, PARAMS, script)
    assert second.num_cached == 128 and answer(second) == answer(oracle(model, turn, PARAMS))


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_prompt_that_is_not_finite_leaves_no_snapshot(kernels):
    """In torch, its token at 200 spoils what a mask hides from tokens of its first span (0 · NaN)."""
    model, bad_id = copy.deepcopy(model_of()), 50
    first, other = ([i - (i == bad_id) for i in random_ids(300, seed=seed)] for seed in (1, 2))
    model.embed.weight[bad_id] = float("nan")
    model = model.with_kernels(kernels)
    first[200] = bad_id
    llm = make_llm(model, max_rows=1, max_chunk=256, prefix_cache=ROOM)
    assert "not finite" in run(llm, first).error
    sharing = (*first[:SPAN], *other[SPAN:])
    expected = oracle(model, sharing, PARAMS)
    assert expected.finish_reason is FinishReason.LENGTH
    for num_cached in (0, 2 * SPAN):
        row = run(llm, sharing)
        assert answer(row) == answer(expected) and row.num_cached == num_cached


def test_bounded_memory_drops_the_least_recently_used():
    model = model_of()
    llm = make_llm(model, max_rows=1, prefix_cache=ROOM)
    prompts = [tuple(random_ids(300, seed=seed)) for seed in range(4)]
    params = replace(PARAMS, max_tokens=1)
    run(llm, prompts[0], params)
    cache = llm.engine.target.prefix_cache
    assert len(cache) == 2
    one = cache.num_bytes
    cache.capacity = int(2.6 * one)
    for prompt in prompts[1:3]:
        run(llm, prompt, params)
    assert cache.num_bytes <= cache.capacity and len(cache) == 5
    # The first prompt's second span went; its first span is still there, and nothing hangs on what is gone.
    assert [run(llm, prompt, params).num_cached for prompt in (prompts[0], prompts[2])] == [128, 256]
    assert cache.num_bytes == sum(node.snapshot.num_bytes for node in cache._nodes.values()) <= cache.capacity
    cache.capacity = 0
    run(llm, prompts[3], params)
    assert len(cache) == 0 and cache.num_bytes == 0


def test_prompt_logprobs_compute_the_whole_prompt():
    model, prompt = model_of(), tuple(random_ids(300, seed=1))
    llm = make_llm(model, prefix_cache=ROOM)
    run(llm, prompt)
    asking = replace(PARAMS, prompt_logprobs=1)
    row = run(llm, prompt, asking)
    assert row.num_cached == 0
    assert row.request.prompt_logprobs == oracle(model, prompt, asking).request.prompt_logprobs


def test_an_aborted_row_leaves_nothing_wrong_behind():
    """Snapshots of an aborted row hold only what was committed."""
    model, prompt = model_of(), tuple(random_ids(250, seed=6))
    llm = make_llm(model, max_rows=1, draft_len=5, prefix_cache=ROOM)
    script = Script().install(llm)
    row = row_of(llm, prompt, replace(PARAMS, max_tokens=200))
    known = oracle(model, prompt, replace(PARAMS, max_tokens=200)).output_token_ids
    script.add(row, [*known, *[5] * 8], cycle(0, 2, 1))
    llm.engine.add([row])
    while row.num_tokens < 270:
        llm.engine.step()
    llm.engine.abort(row.request.request_id)
    turn = (*prompt, *known[:20])
    again = run(llm, turn, PARAMS, script)
    assert again.num_cached == 256 and answer(again) == answer(oracle(model, turn, PARAMS))


def test_set_back_rows_start_from_their_own_snapshots():
    model = model_of()
    llm = make_llm(model, draft_len=0, prefix_cache=ROOM)
    prompt = tuple(random_ids(300, seed=1))
    row = row_of(llm, prompt, PARAMS)
    llm.engine.add([row])
    while len(row.output_token_ids) < 5:
        llm.engine.step()
    llm.engine.scheduler._set_back_one()
    llm.engine.step()
    assert row.kv_len > 256 and row.num_cached == 0, "what a row computed itself is not reported as cached"
    drive(llm)
    assert answer(row) == answer(oracle(model, prompt, PARAMS))
    assert llm.engine.target.prefix_cache.num_cached_tokens == 256


def test_reported_with_the_output():
    llm = make_llm(model_of(), prefix_cache=ROOM)
    prompt, params = random_ids(300, seed=1), SamplingParams(temperature=0.0, max_tokens=2)
    cached = [llm.generate([prompt], params, progress=False)[0].num_cached_tokens for _ in range(2)]
    assert cached == [0, 256]


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_bad_sizes_are_refused(value):
    with pytest.raises(ConfigError, match="'prefix_cache' is"):
        EngineConfig(prefix_cache=value)


def test_left_aligned_is_refused():
    with pytest.raises(ConfigError, match="'prefix_cache' needs kv_layout 'ring'"):
        EngineConfig(prefix_cache=ROOM, kv_layout="left_aligned")
