"""The engine on a device: rows that speculate, each at its own pace, against each request alone without drafts."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from byte_support import byte_tokenizer, tiny_model
from scripted_runs import run_scripted
from speculation_support import (
    GREEDY,
    LENGTHS,
    answer,
    assert_dictated,
    assert_ragged,
    cycle,
    drive,
    make_llm,
    oracle,
    prompt_of,
    row_of,
)
from support import random_ids, transformers_model

from polytempo.async_llm import AsyncLLM
from polytempo.cache.snapshot import SPAN
from polytempo.llm import LLM
from polytempo.server.app import ServerSettings, make_app
from polytempo.types import SamplingParams

KNOWN, EMITTED = 30, 22
"""Tokens of an oracle, and of a row that is held against it: scripts draft what a row emits next."""
PACES = ((1, 3, 0, 2), (3, 0, 2, 1), (0, 2, 3, 1), (2, 1, 0, 3))
"""Right drafts of each row, step by step. The third, whose prompt has 126 tokens, rejects all when it meets 128."""
SHORT = replace(GREEDY, max_tokens=KNOWN)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=KNOWN, ignore_eos=True, logprobs=2)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@each_dtype
@pytest.mark.parametrize("params", [SHORT, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("draft_len", [1, 2, 3])
def test_a_ragged_batch_equals_each_request_alone(model_on, dtype, params, draft_len):
    """Rows of different residues accept 0 to draft_len drafts; some rejected ones have completed an entry of 128."""
    patterns = [cycle(*(min(count, draft_len) for count in counts)) for counts in PACES]
    model = model_on(5, dtype)
    script, steps, rows, _ = run_scripted(LENGTHS, patterns, params, EMITTED, model, draft_len=draft_len, max_chunk=40)
    assert_ragged(steps, num_residues=3)
    assert_dictated(script, steps, rows)
    assert {a.num_emitted for step in steps for a in step if a.num_drafts} == set(range(1, draft_len + 2))


@each_dtype
def test_drafts_of_the_mtp_block_change_nothing(model_on, dtype):
    model = model_on(5, dtype)
    llm = make_llm(model, draft_len=2)
    params = [replace(SHORT, max_tokens=12), replace(SEEDED, max_tokens=12)]
    rows = [row_of(llm, prompt_of(length), one) for length in LENGTHS for one in params]
    for row in rows:
        llm.engine.add([row])
    drive(llm)
    assert sum(row.stats.num_drafted for row in rows) > 50 and llm.engine.proposer.num_forwards > 5
    for row in rows:
        expected = oracle(model, tuple(row.request.prompt_token_ids), row.request.params)
        assert answer(row) == answer(expected)


def test_prefixes_are_reused_on_the_device(model_on):
    model = model_on(5, torch.float32)
    llm = make_llm(model, draft_len=2, prefix_cache=2**24)
    first = tuple(random_ids(2 * SPAN + 20, seed=1))
    params, cached = replace(SHORT, max_tokens=6), []
    for prompt in (first, first, (*first[: SPAN + 9], *random_ids(9, seed=2))):
        row = row_of(llm, prompt, params)
        llm.engine.add([row])
        drive(llm)
        assert answer(row) == answer(oracle(model, prompt, params))
        cached.append(row.num_cached)
    assert cached == [0, 2 * SPAN, SPAN]


def test_choices_share_a_prompt_on_the_device(model_on):
    model = model_on(5, torch.float32)
    llm, plain = make_llm(model, draft_len=2), make_llm(model, max_rows=1, speculate="none")
    params = replace(SEEDED, max_tokens=6, n=3)
    together = llm.generate({"prompt_token_ids": list(prompt_of(131))}, params, progress=False)[0]
    alone = plain.generate({"prompt_token_ids": list(prompt_of(131))}, params, progress=False)[0]
    assert llm.engine.sharing.num_rows == 2 and len({choice.token_ids for choice in together.outputs}) == 3
    for ours, theirs in zip(together.outputs, alone.outputs, strict=True):
        assert (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)


def test_a_live_transformers_model_runs_where_it_is(device, model_on):
    model = model_on(3, torch.float32)
    shared = LLM.from_transformers(transformers_model(model).to(device), max_rows=2, max_model_len=256)
    assert shared.model.device == device and shared.engine.target.store.device == device
    params = replace(SHORT, max_tokens=6)
    prompts = [{"prompt_token_ids": list(prompt_of(length))} for length in (9, 40)]
    found = shared.generate(prompts, params, progress=False)
    own = make_llm(model, max_rows=2, speculate="none").generate(prompts, params, progress=False)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in own]


def test_options_of_sampling_act_on_the_device(model_on):
    model = model_on(5, torch.float32)
    llm = make_llm(model, draft_len=2)
    options = [
        {"temperature": 0.0, "allowed_token_ids": [5, 9, 11]}, {"temperature": 0.0, "logit_bias": {7: 100.0}},
        {"temperature": 1.0, "top_k": 3, "seed": 1}, {"temperature": 1.0, "min_p": 0.2, "seed": 2},
        {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "seed": 3},
    ]  # fmt: skip
    params = [SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=1, **one) for one in options]
    prompts = [{"prompt_token_ids": list(prompt_of(length))} for length in (9, 33, 40, 63, 3)]
    found = llm.generate(prompts, params, progress=False)
    plain = make_llm(model, max_rows=1, speculate="none")
    for prompt, one, output in zip(prompts, params, found, strict=True):
        expected = plain.generate(prompt, one, progress=False)[0]
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.outputs[0].logprobs == expected.outputs[0].logprobs
        assert output.prompt_logprobs == expected.prompt_logprobs
    assert set(found[0].outputs[0].token_ids) <= {5, 9, 11} and set(found[1].outputs[0].token_ids) == {7}


def test_the_phases_of_a_step_make_up_its_time(device, model_on):
    llm = make_llm(model_on(5, torch.float32), draft_len=2)
    llm.engine.add([row_of(llm, prompt_of(40), replace(SHORT, max_tokens=8))])
    steps = drive(llm)
    assert len(steps) == llm.engine.num_steps
    seconds = llm.engine.seconds
    assert min(seconds.plan, seconds.forward, seconds.verify, seconds.propose) > 0
    assert seconds.forward > 0.2 * seconds.total, "most of a step is the target's layers"


def test_a_server_answers_from_the_device(device):
    client_of = pytest.importorskip("starlette.testclient").TestClient
    llm = LLM.from_model(copy.deepcopy(tiny_model()).to(device), byte_tokenizer(), max_rows=4, max_model_len=256)
    app = make_app(AsyncLLM(llm, 60.0), ServerSettings(model_name="tiny", drain_timeout=5.0))
    with client_of(app) as client:
        body = {"prompt": [65, 66, 67], "max_tokens": 6, "temperature": 0, "logprobs": 1}
        answered = client.post("/v1/completions", json=body)
    assert answered.status_code == 200, answered.text
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1)
    expected = llm.generate({"prompt_token_ids": [65, 66, 67]}, params, progress=False)[0].outputs[0]
    choice = answered.json()["choices"][0]
    assert choice["text"] == expected.text and len(choice["logprobs"]["token_logprobs"]) == len(expected.token_ids) > 0
