"""SamplingParams refuses what it cannot honour and names the field; outputs keep their promises."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest

from polytempo.errors import InvariantError, RequestError
from polytempo.types import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    RequestTimings,
    SamplingParams,
)

NAN, INF = float("nan"), float("inf")
BAD_VALUES = [
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", INF),
    ("temperature", "hot"),
    ("temperature", None),
    ("temperature", True),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", NAN),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("min_p", NAN),
    ("top_k", -2),
    ("top_k", 2.0),
    ("top_k", True),
    ("presence_penalty", 2.1),
    ("presence_penalty", NAN),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", NAN),
    ("repetition_penalty", 0),
    ("repetition_penalty", 0.9e-20),
    ("repetition_penalty", 1.1e20),
    ("repetition_penalty", -INF),
    ("repetition_penalty", NAN),
    ("n", 0),
    ("n", None),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.0),
    ("logprobs", -1),
    ("logprobs", True),
    ("prompt_logprobs", -1),
    ("logit_bias", {0: NAN}),
    ("logit_bias", {0: 100.5}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"5": 1.0}),
    ("logit_bias", [1.0]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [3, None]),
    ("allowed_token_ids", [-1]),
    ("stop_token_ids", [None]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", 5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [None]),
    ("stop", 7),
    ("stop", ["ab"] * 129),
    ("stop", "x" * 257),
    ("bad_words", "word"),
    ("bad_words", [""]),
    ("ignore_eos", 1),
    ("detokenize", "yes"),
]


def test_defaults_are_those_of_vllm():
    expected = {
        "n": 1,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": None,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": None,
        "min_tokens": 0,
        "draft_len": None,
        "max_tokens": 16,
        "stop": None,
        "stop_token_ids": None,
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "skip_special_tokens": True,
        "detokenize": True,
    }
    ours = {"json_object": False, "json_schema": None, "regex": None, "grammar": None}
    assert dataclasses.asdict(SamplingParams()) == expected | ours


def test_allowed_ids_are_kept_once():
    assert SamplingParams(allowed_token_ids=[3, 5, 3]).allowed_token_ids == (3, 5)


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{name: value})
    message = str(refused.value)
    assert message.startswith(f"SamplingParams {name}=")
    assert f"{name} must be" in message


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 5},
        {"top_k": -1},
        {"top_k": 10**9},
        {"top_p": 1},
        {"top_p": 1e-6},
        {"min_p": 1},
        {"presence_penalty": -2},
        {"frequency_penalty": 2},
        {"repetition_penalty": 1e-20},
        {"repetition_penalty": 1e20},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"min_tokens": 16},
        {"min_tokens": 99, "max_tokens": None},
        {"logprobs": 0},
        {"logit_bias": {0: -100, 7: 100}},
        {"stop": []},
    ],
)
def test_the_edges_of_every_range_are_accepted(options):
    params = SamplingParams(**options)
    for name, value in options.items():
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(params, name) == expected


@pytest.mark.parametrize("build", [lambda o: SamplingParams(**o), SamplingParams.from_dict])
def test_an_unknown_option_is_answered_with_the_nearest(build):
    with pytest.raises(RequestError, match="unknown SamplingParams option 'temprature'; did you mean 'temperature'"):
        build({"temprature": 0.5})


def test_from_dict_builds_the_same_and_refuses_other_types():
    assert SamplingParams.from_dict({"top_k": 3, "seed": 1}) == SamplingParams(top_k=3, seed=1)
    with pytest.raises(RequestError, match="must be a dict"):
        SamplingParams.from_dict([("top_k", 3)])


def test_params_are_frozen_detached_from_the_callers_lists_and_survive_copies():
    stop, bias = ["a"], {1: 2}
    params = SamplingParams(stop=stop, logit_bias=bias, seed=5)
    stop.append("b")
    bias[1] = NAN
    assert params.stop == ("a",) and params.logit_bias == {1: 2.0}
    assert SamplingParams(stop="a").stop == ("a",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 1
    for copied in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params)):
        assert copied == params and hash(copied) == hash(params)
    with pytest.raises(RequestError, match="top_p"):
        dataclasses.replace(params, top_p=2.0)


def test_only_temperature_zero_is_greedy():
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy
    assert not SamplingParams(top_k=3).is_greedy


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="stop=.*detokenize"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_ids_beyond_the_vocabulary_are_refused(name):
    value = {9: 1.0, 10: 1.0} if name == "logit_bias" else [9, 10]
    params = SamplingParams(**{name: value})
    params.validate_for_vocab(11)
    with pytest.raises(RequestError, match=rf"{name}=\[10\].*vocabulary size 10"):
        params.validate_for_vocab(10)


def test_too_many_logprobs_are_refused_and_top_k_is_not():
    SamplingParams(logprobs=10, prompt_logprobs=10, top_k=999).validate_for_vocab(10)
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestError, match=f"{name}=11.*vocabulary size 10"):
            SamplingParams(**{name: 11}).validate_for_vocab(10)


def test_outputs_count_and_time():
    outputs = [
        CompletionOutput(0, "ab", [1, 2], finish_reason="stop", stop_reason=7),
        CompletionOutput(1, "c", [3], logprobs=[{3: Logprob(-0.5, 1)}]),
    ]
    timings = RequestTimings(arrival=1.0, first_token=1.5, finished=4.0)
    output = RequestOutput("r", None, [5, 6, 7], None, outputs, False, timings)
    assert (output.num_prompt_tokens, output.num_output_tokens) == (3, 3)
    assert (timings.ttft, timings.e2e) == (0.5, 3.0)
    assert RequestTimings(1.0).ttft is None and RequestTimings(1.0).e2e is None
    assert outputs[0].finish_reason is FinishReason.STOP and f"{outputs[0].finish_reason}" == "stop"
    assert outputs[0].finished and not outputs[1].finished


def test_logprobs_must_agree_with_token_ids():
    with pytest.raises(InvariantError, match="2 token ids, 1 logprob"):
        CompletionOutput(0, "", [1, 2], logprobs=[{}])
    with pytest.raises(ValueError):
        CompletionOutput(0, "", [], finish_reason="done")


def test_types_import_no_torch():
    program = "import sys, polytempo.types; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
