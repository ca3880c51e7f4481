"""The engine at the level of requests: what a batch returns is what each request returns alone."""

import math
import random

import pytest
import torch
from support import TINY, random_ids, random_model

from polytempo.engine.draft_length import DraftPolicy
from polytempo.engine_config import EngineConfig
from polytempo.errors import ConfigError, RequestError
from polytempo.llm import LLM
from polytempo.types import FinishReason, SamplingParams


def make_llm(model, **options) -> LLM:
    """An LLM over live weights, without checkpoint or tokenizer."""
    defaults = {"max_rows": 8, "max_model_len": 768, "max_chunk": 96, "max_step_tokens": 200}
    return LLM.from_model(model, **{**defaults, **options})


@pytest.fixture(scope="module")
def model():
    return random_model(seed=5)


def answer(output):
    """What must not depend on the batch: tokens, logprobs to the last bit, reasons."""
    return [(tuple(c.token_ids), c.logprobs, c.finish_reason, c.stop_reason) for c in output.outputs]


def mixed_requests(count: int, seed: int):
    generator = random.Random(seed)
    prompts = [random_ids(length, seed=seed * 100 + place) for place, length in enumerate(
        generator.choice([generator.randint(1, 40), generator.randint(100, 300), generator.randint(300, 700)])
        for _ in range(count))]  # fmt: skip
    params = []
    for place in range(count):
        greedy = place % 3 == 0
        params.append(SamplingParams(
            temperature=0.0 if greedy else 0.9, top_k=0 if place % 2 else 20, top_p=0.95 if place % 4 else 1.0,
            seed=place, n=2 if place % 5 == 1 else 1, max_tokens=generator.randint(3, 14), logprobs=2,
            ignore_eos=place % 7 != 0, frequency_penalty=0.4 if place % 6 == 2 else 0.0,
        ))  # fmt: skip
    return prompts, params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_batch_equals_alone(dtype):
    """32 requests over 8 seats, chunked prefills between decodes: tokens and logprob bits equal each one alone."""
    model = random_model(seed=5, dtype=dtype)
    prompts, params = mixed_requests(32, seed=1)
    lengths = [len(prompt) for prompt in prompts]
    assert {length % 4 for length in lengths} == {0, 1, 2, 3} and min(lengths) < 16 and max(lengths) > 512
    together = make_llm(model).generate(prompts, params, progress=False)
    alone_engine = make_llm(model, max_rows=2, max_chunk=768, max_step_tokens=2048)
    for prompt, one, output in zip(prompts, params, together, strict=True):
        alone = alone_engine.generate([prompt], one, progress=False)[0]
        assert answer(output) == answer(alone), f"prompt of {len(prompt)} tokens"
    produced = [tuple(c.token_ids) for output in together for c in output.outputs]
    assert len(set(produced)) > 25, "outputs are too alike to show a mix-up of rows"


def test_order_and_neighbours_change_nothing(model):
    prompts, params = mixed_requests(12, seed=2)
    base = make_llm(model).generate(prompts, params, progress=False)
    order = list(range(12))
    random.Random(0).shuffle(order)
    for max_rows in (3, 12):
        llm = make_llm(model, max_rows=max_rows)
        shuffled = llm.generate([prompts[i] for i in order], [params[i] for i in order], progress=False)
        for place, source in enumerate(order):
            assert answer(shuffled[place]) == answer(base[source])
        llm.engine.scheduler.check()
        assert llm.engine.scheduler.num_free_slots == max_rows


def test_choices_of_one_seed_differ_and_repeat(model):
    """n=4 with one seed gives four reproducible, not all equal, choices; unseeded requests differ."""
    llm = make_llm(model)
    params = SamplingParams(n=4, seed=42, temperature=1.0, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate([random_ids(20, 1)], params, progress=False)[0] for _ in range(2))
    assert answer(first) == answer(second)
    assert len({c.token_ids for c in first.outputs}) == 4
    free = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([random_ids(20, 1)] * 20, free, progress=False)
    assert len({output.outputs[0].token_ids for output in outputs}) > 1


def test_broken_request_harms_no_neighbour(model):
    """A row whose logits are NaN ends with an error that says so; neighbours and the seat's next owner are right."""
    poisoned = random_model(seed=5)
    bad_id = 96
    poisoned.embed.weight[bad_id] = math.nan
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    good = [[i for i in random_ids(length, seed=length) if i != bad_id] for length in (5, 130, 33, 250, 17)]
    bad = [*random_ids(40, seed=9), bad_id, 3]
    llm = make_llm(poisoned, max_rows=2)
    outputs = llm.generate([good[0], bad, *good[1:]], params, progress=False)
    failed = outputs.pop(1).outputs[0]
    assert failed.finish_reason is FinishReason.ERROR and "not finite" in failed.error and failed.token_ids == ()
    expected = make_llm(model).generate(good, params, progress=False)
    assert [answer(o) for o in outputs] == [answer(o) for o in expected]
    assert llm.engine.scheduler.num_free_slots == 2


def test_abort_frees_the_seat_at_once(model):
    llm = make_llm(model, max_rows=2)
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    doomed = llm.rows_of(random_ids(500, 3), params)
    waiting = llm.rows_of(random_ids(5, 4), params)
    staying = llm.rows_of(random_ids(30, 5), params)
    for rows in (doomed, staying, waiting):
        llm.engine.add(rows)
    for _ in range(3):
        llm.engine.step()
    assert 0 < doomed[0].kv_len < 500, "the fixture must abort in the middle of a prefill"
    assert llm.engine.abort(doomed[0].request.request_id) == 1
    assert doomed[0].finish_reason is FinishReason.ABORT and llm.engine.abort("request-99") == 0
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.scheduler.check()
    fresh = make_llm(model, max_rows=1).generate([random_ids(5, 4)], params, progress=False)[0]
    assert tuple(waiting[0].output_token_ids) == fresh.outputs[0].token_ids


@pytest.mark.parametrize("prompt_len", range(57, 64))
def test_context_limit(model, prompt_len):
    """A row stops at exactly max_model_len tokens with "length"; its roomy neighbour goes on."""
    llm = make_llm(model, max_model_len=64)
    params = [SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)] * 2
    near, far = llm.generate([random_ids(prompt_len, 7), random_ids(10, 8)], params, progress=False)
    assert len(near.outputs[0].token_ids) == 64 - prompt_len and near.outputs[0].finish_reason is FinishReason.LENGTH
    assert len(far.outputs[0].token_ids) == 54
    roomy = SamplingParams(temperature=0.0, max_tokens=64 - prompt_len, ignore_eos=True)
    alone = make_llm(model).generate([random_ids(prompt_len, 7)], roomy, progress=False)[0]
    assert near.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_max_tokens_counts_every_token_once(model, max_tokens):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    output = make_llm(model).generate([random_ids(9, 1)], params, progress=False)[0]
    choice = output.outputs[0]
    assert len(choice.token_ids) == len(choice.logprobs) == output.num_output_tokens == max_tokens
    assert choice.cumulative_logprob == pytest.approx(sum(
        entry[token].logprob for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)))  # fmt: skip


def test_stop_ids_eos_and_min_tokens(model):
    """A stop id ends the output at its first use from index min_tokens on, and is reported."""
    llm, prompt = make_llm(model), random_ids(12, 3)
    free = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True), progress=False)[0]
    ids = free.outputs[0].token_ids
    stop = ids[3]
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, stop_token_ids=[stop])
    choice = llm.generate([prompt], params, progress=False)[0].outputs[0]
    assert choice.token_ids == ids[: ids.index(stop) + 1]
    assert (choice.finish_reason, choice.stop_reason) == (FinishReason.STOP, stop)
    later = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, stop_token_ids=[stop], min_tokens=6)
    banned = llm.generate([prompt], later, progress=False)[0].outputs[0]
    assert stop not in banned.token_ids[:6] and len(banned.token_ids) >= 6


def test_eos_of_the_config_ends_a_row():
    model = random_model(seed=5)
    llm, prompt = make_llm(model), random_ids(12, 3)
    ids = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), progress=False)
    third = ids[0].outputs[0].token_ids[2]
    object.__setattr__(model, "config", type(TINY)(**{**vars(TINY), "eos_token_ids": (third,)}))
    params = SamplingParams(temperature=0.0, max_tokens=6)
    choice = make_llm(model).generate([prompt], params, progress=False)[0].outputs[0]
    assert choice.token_ids[-1] == third and len(choice.token_ids) <= 3
    assert (choice.finish_reason, choice.stop_reason) == (FinishReason.STOP, None)


def test_prompt_logprobs_are_teacher_forced(model):
    """Entry i is the log-probability of prompt token i given those before it, however the prompt is cut."""
    prompt = random_ids(150, 6)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2, n=2)
    llm = make_llm(model, max_chunk=37)
    output = llm.generate([prompt], params, progress=False)[0]
    whole = make_llm(model, max_chunk=200).generate([prompt], params, progress=False)[0]
    assert output.prompt_logprobs == whole.prompt_logprobs
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 150
    from support import Harness

    expected = Harness(model).prefill(prompt, [150]).double().log_softmax(-1)
    for place in range(1, 150):
        entry = output.prompt_logprobs[place]
        assert entry[prompt[place]].logprob == pytest.approx(expected[place - 1, prompt[place]].item(), abs=1e-4)
        assert len(entry) in (2, 3)


@pytest.mark.parametrize(("prompt", "words"), [
    ([], ("empty", "at least one")),
    ([1, 97], ("97", "0..96")),
    ([-1], ("-1", "0..96")),
    (random_ids(64, 1), ("64 tokens", "max_model_len")),
    ("text", ("tokenizer",)),
    ({"prompt": "a", "x": 1}, ("prompt_token_ids",)),
    ([1, 2.5], ("token ids",)),
    ([True], ("token ids",)),
])  # fmt: skip
def test_bad_prompt_is_refused_before_anything_runs(model, prompt, words):
    llm = make_llm(model, max_model_len=64)
    with pytest.raises(RequestError) as caught:
        llm.generate([[1, 2, 3], prompt], progress=False)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert llm.engine.num_steps == 0 and not llm.engine.has_work


def test_options_are_checked(model):
    with pytest.raises(ConfigError, match="did you mean 'max_rows'"):
        LLM("/nonexistent", max_row=3)
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        make_llm(model, max_model_len=4096)
    with pytest.raises(ConfigError, match="max_chunk"):
        EngineConfig(max_chunk=0)
    with pytest.raises(RequestError, match="2 params for 1 prompts"):
        make_llm(model).generate([[1]], [SamplingParams(), SamplingParams()])


def test_without_drafts_nothing_is_asked_of_the_policy(model, monkeypatch):
    """It costs a twentieth of a step of 64 rows; draft_len is "auto" unless said otherwise."""
    llm = make_llm(model, speculate="none", draft_len="auto")
    for name in ("lengths", "record_verifying"):
        monkeypatch.setattr(DraftPolicy, name, lambda *_: pytest.fail("asked"))
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    assert len(llm.generate([[3, 4, 5]], params, progress=False)[0].outputs[0].token_ids) == 5
