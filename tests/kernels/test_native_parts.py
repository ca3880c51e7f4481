"""Parts of a block against their torch twins, and against themselves over row counts and threads."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kernel_support import CONFIGS, DTYPES, Parts, model_of, random_streams

from polytempo.kernels.build import load
from polytempo.model.hyper import StreamWeights, collapse, expand
from polytempo.model.moe import Gate

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
each_config = pytest.mark.parametrize("config_name", list(CONFIGS))
COUNTS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 40, 64, 65, 130)
FP32_FLOOR = 4e-6
"""Largest difference between two orders of summation in float32, as a share of the range; measured: 1e-6."""


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Equal but for the order of summation, or in bfloat16 but for the last bit of the largest."""
    span = float(theirs.float().max() - theirs.float().min())
    allowed = FP32_FLOOR if dtype == torch.float32 else 2**-8
    return float((ours.float() - theirs.float()).abs().max()) <= allowed * span


@each_dtype
@each_config
def test_site(config_name, dtype):
    model = model_of(config_name, dtype)
    parts, streams = Parts(model, 1), random_streams(model, 130)
    for which, norm in (("attn", parts.block.attn_norm), ("ffn", parts.block.ffn_norm)):
        x, post, comb = parts.site(streams, which)
        weights = getattr(parts.block, f"hc_{which}")(streams)
        assert close(post, weights.post.t())
        assert close(comb, weights.comb.permute(2, 0, 1))
        assert close(x, norm(collapse(streams, weights.pre)), dtype)
        for count in COUNTS:
            for first in (0, 130 - count):
                for threads in (1, 2):
                    found = Parts(model, 1, threads).site(streams[first : first + count].contiguous(), which)
                    assert all(
                        torch.equal(part, whole[first : first + count])
                        for part, whole in zip(found, (x, post, comb), strict=True)
                    ), (count, first, threads)


@each_dtype
@each_config
def test_expand(config_name, dtype):
    model = model_of(config_name, dtype)
    parts, streams = Parts(model, 1), random_streams(model, 40)
    output = random_streams(model, 40, seed=1)[:, 0].contiguous()
    _, post, comb = parts.site(streams)
    found = parts.expand(streams, output, post, comb)
    weights = StreamWeights(None, post.t(), comb.permute(1, 2, 0))
    assert close(found, expand(streams, output, weights), dtype)
    for count in (1, 2, 7, 8, 9, 39):
        part = Parts(model, 1, 2).expand(streams[:count].contiguous(), output, post, comb)
        assert torch.equal(part, found[:count])


@each_dtype
@each_config
@pytest.mark.parametrize("layer_idx", [0, 1], ids=["hash", "scores"])
def test_moe(config_name, dtype, layer_idx):
    model = model_of(config_name, dtype)
    parts = Parts(model, layer_idx)
    x = random_streams(model, 130)[:, 0].contiguous()
    ids = torch.arange(130) * 7 % model.config.vocab_size
    found, twin = parts.moe(x, ids), parts.block.ffn(x, ids)
    if dtype == torch.float32:
        assert close(found, twin)
    else:
        exact = Parts(model_of(config_name, torch.float32), layer_idx).block.ffn(x.float(), ids)
        floor = (twin.float() - exact).abs().mean()
        assert (found.float() - exact).abs().mean() <= 1.5 * floor
    for count in COUNTS:
        for first in (0, 130 - count):
            for threads in (1, 2):
                part = x[first : first + count].contiguous(), ids[first : first + count].contiguous()
                parts.moe(-part[0], part[1])  # what is not written would else be there, from a call before
                assert torch.equal(Parts(model, layer_idx, threads).moe(*part), found[first : first + count])


LATE = """
import torch
from polytempo.kernels import ops
from polytempo.kernels.build import load

x, weight = torch.randn(64, 2048), torch.randn(1024, 2048)
expected = ops.linear(load(), x, weight, threads=1)
for turn in range(30):
    # Opposite signs in turn: what an unfinished call leaves in its memory is the result before, negated.
    ours = ops.linear(load(), x if turn % 2 else -x, weight, threads=4)
    assert torch.equal(ours, expected if turn % 2 else -expected)
"""


def test_threads_that_are_late():
    """Three workers on a core or two take tasks and lose the core before they are done: the caller must wait.

    In a process of its own, since a caller that does not wait may end it.
    """
    load()
    assert subprocess.run([sys.executable, "-c", LATE], check=False).returncode == 0


def test_calls_from_several_python_threads():
    """One of them has the workers, the others do their tasks themselves."""
    model = model_of("tiny", torch.float32)
    inputs = [(random_streams(model, 20, seed)[:, 0].contiguous(), torch.arange(20) + seed) for seed in range(4)]
    parts = Parts(model, 1, threads=3)
    expected = [parts.moe(*one) for one in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(40):
            found = pool.map(lambda one: parts.moe(*one), inputs)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_no_workers_and_the_same_results():
    model = model_of("tiny", torch.float32)
    x, ids = random_streams(model, 20)[:, 0].contiguous(), torch.arange(20)
    parts = Parts(model, 1, threads=2)
    expected = parts.moe(x, ids)
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(parts.moe(x, ids), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_moe_of_many_tokens_on_one_expert():
    """All tokens share their experts: more rows than one task of an expert takes."""
    model = model_of("odd", torch.float32)
    parts = Parts(model, 0)
    x, ids = random_streams(model, 150)[:, 0].contiguous(), torch.full((150,), 5)
    found = parts.moe(x, ids)
    assert close(found, parts.block.ffn(x, ids))
    assert torch.equal(Parts(model, 0, 2).moe(x[70:71].contiguous(), ids[:1]), found[70:71])


def test_swiglu_clamps():
    """Gates and ups far past the limit on both sides, of the routed and the shared expert."""
    model = model_of("tiny", torch.float32)
    parts, limit = Parts(model, 0), model.config.swiglu_limit
    x, ids = random_streams(model, 30)[:, 0].contiguous(), torch.arange(30)
    for weight in (parts.block.ffn.experts.w13, parts.block.ffn.shared_experts.w1.weight,
                   parts.block.ffn.shared_experts.w3.weight):  # fmt: skip
        weight *= 30
    ups = x @ parts.block.ffn.shared_experts.w3.weight.T
    assert (ups > limit).any() and (ups < -limit).any()
    assert close(parts.moe(x, ids), parts.block.ffn(x, ids))


def test_equal_scores_choose_the_lowest_experts():
    model = model_of("tiny", torch.float32)
    parts = Parts(model, 1)
    gate: Gate = parts.block.ffn.gate
    gate.weight.zero_()
    gate.bias.zero_()
    x, ids = random_streams(model, 3)[:, 0].contiguous(), torch.zeros(3, dtype=torch.int64)
    whole = parts.moe(x, ids)
    parts.block.ffn.experts.w2[gate.top_k :] = float("nan")
    assert torch.equal(parts.moe(x, ids), whole)
    parts.block.ffn.experts.w2[gate.top_k - 1] = float("nan")
    assert parts.moe(x, ids).isnan().all()


def test_bias_takes_part_in_the_choice_only():
    model = model_of("tiny", torch.float32)
    parts, x = Parts(model, 1), None
    x, ids = random_streams(model, 20)[:, 0].contiguous(), torch.zeros(20, dtype=torch.int64)
    before = parts.moe(x, ids)
    parts.block.ffn.gate.bias += 3.0
    # The choice compares score + bias, rounded: only near ties could move.
    assert torch.equal(parts.moe(x, ids), before)
    parts.block.ffn.gate.bias[4] = 100.0
    moved = parts.moe(x, ids)
    assert not torch.equal(moved, before) and close(moved, parts.block.ffn(x, ids))


def test_a_row_that_is_not_finite_keeps_to_itself():
    model = model_of("tiny", torch.float32)
    parts, streams = Parts(model, 1), random_streams(model, 20)
    ids = torch.arange(20)
    expected, experts = parts.site(streams)[0], parts.moe(streams[:, 0].contiguous(), ids)
    streams[7] = float("nan")
    others = [row for row in range(20) if row != 7]
    found = parts.site(streams)[0]
    assert torch.equal(found[others], expected[others]) and found[7].isnan().all()
    found = parts.moe(streams[:, 0].contiguous(), ids)
    assert torch.equal(found[others], experts[others]) and found[7].isnan().all()
