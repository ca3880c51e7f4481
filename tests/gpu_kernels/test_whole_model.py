"""A model through the Triton kernels: near the torch path, rows by themselves, drafts that change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from speculation_support import Script, answer, assert_dictated, cycle, drive, make_llm, row_of
from support import TINY, Harness, random_ids, random_model, relative_difference, with_ratios
from triton_support import HAS_GPU, each_dtype, randn

from polytempo import gpu
from polytempo.cache.layout import Segment
from polytempo.gpu import grid
from polytempo.model import ops
from polytempo.model.cached_attention import _Blocks, attend_blocks
from polytempo.types import SamplingParams

# The interpreter takes 5 ms for a tile of anything.
SMALL = with_ratios(
    0, 4, hidden_size=32, moe_intermediate_size=16, num_attention_heads=2, head_dim=16, q_lora_rank=16, o_lora_rank=8,
    index_n_heads=2, index_topk=2, sliding_window=8, n_routed_experts=4, vocab_size=60, hc_mult=2,
)  # fmt: skip
pytestmark = pytest.mark.skipif(HAS_GPU, reason="these models are on the CPU; tests marked gpu run models on the GPU")


def triton_model(config, dtype):
    return random_model(config, seed=3, dtype=dtype).with_kernels("triton")


def count_launches(monkeypatch) -> list[str]:
    """The kernels that are launched from here on."""
    launched, launch = [], grid.launch

    def spy(kernel, *arguments, **constants):
        launched.append(kernel.__name__)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(grid, "launch", spy)
    return launched


@each_dtype
def test_logits_are_near_the_torch_paths(dtype, monkeypatch):
    launched = count_launches(monkeypatch)
    model = triton_model(with_ratios(0, 4, 128, hidden_size=32, moe_intermediate_size=16, num_attention_heads=2), dtype)
    segments = [Segment(0, 0, random_ids(17, 1)), Segment(1, 0, random_ids(3, 2))]
    found = torch.cat(Harness(model).logits(*segments))
    always = {"product_kernel", "rms_norm_kernel", "gate_up_kernel", "down_kernel"}
    assert set(launched) == always | ({"attend_kernel"} if dtype == torch.bfloat16 else set())
    launched.clear()
    twin = torch.cat(Harness(model.with_kernels("torch")).logits(*segments))
    assert not launched, "the model's choice"
    # Sums of few terms in other orders; in bfloat16 a rounding that falls the other way is felt in every layer after.
    assert relative_difference(found, twin) < {torch.float32: 5e-6, torch.bfloat16: 0.02}[dtype]
    assert relative_difference(found.roll(1, 0), twin) > 0.1


def test_rows_and_chunks_do_not_change_logits():
    """A prompt in one piece, in chunks, and beside others; then tokens one at a time."""
    model = triton_model(SMALL, torch.float32)
    ids, other = random_ids(14, 1, SMALL.vocab_size), random_ids(9, 2, SMALL.vocab_size)
    expected = Harness(model).prefill(ids, [14])
    harness = Harness(model)
    first = harness.logits(Segment(2, 0, other[:5]), Segment(0, 0, ids[:11]))[1]
    second = harness.logits(Segment(0, 11, ids[11:13]), Segment(2, 5, other[5:]))[0]
    third = harness.logits(Segment(0, 13, ids[13:]))[0]
    assert torch.equal(torch.cat((first, second, third)), expected)
    assert relative_difference(expected[-1], expected[-2]) > 0.05


def two_parts(seed: int = 0):
    """Queries [1, 2, 2, 16], a window and entries in bfloat16, sink and scale."""
    keys = [randn(1, 64, 16, seed=seed + i, dtype=torch.bfloat16) for i in range(2)]
    masks = [torch.arange(64) < torch.tensor([[[40], [50]]]), torch.arange(64) < torch.tensor([[[9], [60]]])]
    parts = [_Blocks(key, mask) for key, mask in zip(keys, masks, strict=True)]
    return randn(1, 2, 2, 16, seed=seed + 5, dtype=torch.bfloat16), parts, randn(2, seed=seed + 6), 0.25


def test_attention_meets_the_window_first():
    queries, parts, sink, scale = two_parts()
    found = attend_blocks(queries, parts, sink, scale)
    assert torch.equal(found, gpu.attend(queries, [(part.keys, part.mask) for part in parts], sink, scale))
    assert not torch.equal(found, attend_blocks(queries, parts[::-1], sink, scale)), "bits show the order"


def test_a_callers_mask_is_heeded(monkeypatch):
    queries, (window, entries), sink, scale = two_parts()
    parts = [replace(window, bias=randn(1, 2, 2, 64, seed=9)), entries]
    found = attend_blocks(queries, parts, sink, scale)
    without = attend_blocks(queries, [window, entries], sink, scale)
    monkeypatch.setattr(ops, "TRITON_DEVICES", set())
    assert (found - attend_blocks(queries, parts, sink, scale)).abs().max() < 0.01 < (found - without).abs().max()


def check_drafts(config, dtype, lengths, num_tokens):
    """Each request alone without drafts, then all of them at once with two drafts of which none, both or one fit."""
    model = triton_model(config, dtype)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
    sampled = replace(params, temperature=0.8, seed=7, top_p=0.9)
    prompts = [random_ids(length, i, config.vocab_size) for i, length in enumerate(lengths)]
    requests = [(prompt, (params, sampled)[i % 2]) for i, prompt in enumerate(prompts)]
    expected = []
    for prompt, one in requests:
        llm = make_llm(model, max_rows=1)
        expected.append(row_of(llm, prompt, one))
        llm.engine.add(expected[-1:])
        drive(llm)
    llm, script = make_llm(model, draft_len=2), Script(config.vocab_size)
    script.install(llm)
    rows = [
        script.add(row_of(llm, prompt, one), alone.output_token_ids, cycle(2, 0, 1, offset=i))
        for i, ((prompt, one), alone) in enumerate(zip(requests, expected, strict=True))
    ]
    llm.engine.add(rows)
    assert_dictated(script, drive(llm), rows)
    assert [answer(row) for row in rows] == [answer(row) for row in expected]
    assert {right for row in rows for _, right in script.of(row)} >= {0, 2}, "some drafts must fit and some not"
    llm = make_llm(model, draft_len=2, speculate="mtp")
    rows = [row_of(llm, prompt, one) for prompt, one in requests]
    llm.engine.add(rows)
    drive(llm)
    assert [answer(row) for row in rows] == [answer(row) for row in expected]
    assert llm.engine.stats.num_drafted > 0


def test_drafts_and_neighbours_change_no_token():
    check_drafts(SMALL, torch.bfloat16, (6, 3), num_tokens=5)


@pytest.mark.long
@each_dtype
def test_drafts_and_neighbours_change_no_token_in_all_kinds_of_layers(dtype):
    check_drafts(TINY, dtype, (3, 17, 126), num_tokens=8)
