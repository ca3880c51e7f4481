"""Sampling keeps to the logits' device and reads nothing back: tokens come to the host in one copy of the caller's."""

from __future__ import annotations

import pytest
import torch
from fake_cuda import DEVICE, Answers, Refusals, fake_cuda
from torch._subclasses.fake_tensor import DataDependentOutputException

from polytempo.engine.bad_words import BadWords
from polytempo.engine.logprobs import gather_logprobs
from polytempo.engine.sampling import NO_TOKEN, SampledTokens, sample
from polytempo.engine.sampling_position import SamplingPosition
from polytempo.types import SamplingParams

VOCAB = 97
GREEDY = {"temperature": 0.0}
OPTIONS = {
    "greedy": GREEDY,
    "the whole vocabulary": {"temperature": 0.8},
    "min_p": {"temperature": 0.8, "min_p": 0.1},
    "top_k": {"temperature": 1.2, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_k and top_p": {"top_k": 200, "top_p": 0.5, "min_p": 0.01},
    "penalties": {**GREEDY, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.1},
    "a penalty of the output alone": {"presence_penalty": 0.5},
    "bias": {**GREEDY, "logit_bias": {3: 1.5, 7: -100.0}},
    "allowed tokens": {**GREEDY, "allowed_token_ids": [1, 5, 9]},
    "stops that min_tokens bans": {**GREEDY, "min_tokens": 9},
}


def position(place: int, **options) -> SamplingPosition:
    return SamplingPosition(
        SamplingParams(**options), prompt_token_ids=[1, 2, 3], output_token_ids=[4, 5, 4], position=6,
        seed=2**40 + place, stop_token_ids=frozenset({1, 2}),
    )  # fmt: skip


def masked(place: int) -> SamplingPosition:
    constrained = position(place, **GREEDY)
    constrained.grammar_mask = bytes([255] * 16)
    constrained.bad_words = BadWords.of([(4, 9), (8,)])
    return constrained


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*OPTIONS, "a grammar and bad words", "all of them"])
def test_drawing_never_waits(name, dtype):
    plain = [position(place, **options) for place, options in enumerate(OPTIONS.values())]
    constrained = [masked(place) for place in range(2)]
    positions = {"all of them": plain + constrained, "a grammar and bad words": constrained}.get(name)
    positions = positions or [position(place, **OPTIONS[name]) for place in range(3)]
    with fake_cuda(), torch.inference_mode(), Refusals():
        drawn = sample(torch.empty(len(positions), VOCAB, dtype=dtype, device=DEVICE), positions)
        for part in (drawn.token_ids, drawn.is_finite, drawn.has_candidates):
            assert part.device == DEVICE and part.shape == (len(positions),)


def test_log_probabilities_come_in_one_copy():
    with fake_cuda(), torch.inference_mode(), Refusals(), Answers(7) as answers:
        token_ids = torch.empty(3, dtype=torch.int64, device=DEVICE)
        entries = gather_logprobs(torch.empty(3, VOCAB, device=DEVICE), token_ids, [0, 2, 5])
    assert answers.asked == {"tolist": 1} and len(entries) == 3
    assert all(isinstance(token_id, int) for entry in entries for token_id in entry)


def test_only_a_failure_is_looked_into():
    with fake_cuda(), torch.inference_mode(), Refusals():
        flags = (torch.empty(2, dtype=torch.bool, device=DEVICE) for _ in range(2))
        drawn = SampledTokens(torch.empty(2, dtype=torch.int64, device=DEVICE), *flags)
        assert drawn.failures([5, 6]) == {}
        with pytest.raises(DataDependentOutputException):
            drawn.failures([5, NO_TOKEN])
