"""Sampling leaves to the kernels what they can do, and draws the same tokens by them."""

from __future__ import annotations

import pytest
import torch

from polytempo import LLM, SamplingParams
from polytempo.engine import noise, sampling
from polytempo.engine.sampling import TORCH, SamplingOps, sample
from polytempo.engine.sampling_position import SamplingPosition


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0)], ids=["drawn", "greedy"])
def test_the_given_operations_are_used_and_change_no_token(params):
    logits = torch.randn(5, 37, generator=torch.Generator().manual_seed(0))
    positions = [SamplingPosition(params, [1], [], position, seed=7) for position in range(5)]
    used = []
    ops = SamplingOps(
        lambda logits: used.append("greedy") or sampling.greedy(logits),
        lambda *address: used.append("uniform") or noise.uniform(*address),
    )
    found = sample(logits, positions, ops).token_ids
    assert torch.equal(found, sample(logits, positions).token_ids) and len(set(found.tolist())) > 2
    assert used == ["greedy" if params.temperature == 0 else "uniform"]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_an_engine_draws_by_its_model_s_operations(kernels):
    target = LLM(max_rows=1, max_model_len=64, kernels=kernels, progress=False).engine.target
    native = target.model.native
    assert (native is None) == (kernels == "torch")
    assert target.sampling_ops == (TORCH if native is None else SamplingOps(native.greedy, native.uniform))
