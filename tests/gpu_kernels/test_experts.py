"""Experts in Triton: near their twin, and each token a function of itself and its own experts."""

from __future__ import annotations

import pytest
import torch
from triton_support import DEVICE, each_dtype, randn

from polytempo import gpu
from polytempo.errors import InvariantError
from polytempo.gpu import experts
from polytempo.gpu.products import TILES
from polytempo.model import moe, ops
from polytempo.model.packed import Packed

NUM_EXPERTS, INNER, WIDTH, LIMIT = 5, 35, 50, 1.5


def weights(dtype):
    w13 = randn(NUM_EXPERTS, 2 * INNER, WIDTH, seed=1, dtype=dtype) / 5
    return w13, randn(NUM_EXPERTS, WIDTH, INNER, seed=2, dtype=dtype) / 5


def random_choices(num_tokens: int, top_k: int, seed: int = 0, of: int = NUM_EXPERTS) -> torch.Tensor:
    """Distinct experts of each token, in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(of, generator=generator)[:top_k] for _ in range(num_tokens)]).to(DEVICE)


def module_of(dtype):
    class Config:
        n_routed_experts, moe_intermediate_size, hidden_size, swiglu_limit = NUM_EXPERTS, INNER, WIDTH, LIMIT

    module = moe.Experts(Config, dtype, DEVICE)
    w13, w2 = weights(dtype)
    module.w13.copy_(w13)
    module.w2.copy_(w2)
    return module


CHOICES = {
    "random": random_choices(23, 3),
    "one token": random_choices(1, 3),
    "all on one expert": torch.full((40, 1), 3, device=DEVICE),
    "only the first and the last": torch.tensor([[0, 4], [4, 0], [4, 0]], device=DEVICE),
    "whole tiles": torch.arange(2, device=DEVICE).repeat_interleave(16).unsqueeze(1) + 1,
}


@each_dtype
@pytest.mark.parametrize("name", CHOICES)
def test_as_the_twin(dtype, name, monkeypatch):
    module, expert_ids = module_of(dtype), CHOICES[name]
    x = randn(len(expert_ids), WIDTH, seed=3, dtype=dtype)
    shares = randn(*expert_ids.shape, seed=4).abs()
    found = module(x, expert_ids, shares)
    monkeypatch.setattr(ops, "TRITON_DEVICES", set())
    twin = module(x, expert_ids, shares)
    w13, w2 = weights(dtype)
    gate, up = torch.einsum("td,tkid->tki", x.double(), w13[expert_ids].double()).chunk(2, dim=-1)
    assert (gate > LIMIT).any() and (up > LIMIT).any() and (up < -LIMIT).any(), "the limit must matter"
    assert found.dtype == torch.float32 and found.shape == x.shape
    # Three roundings to the dtype on the way (projections, activation, output), and sums of up to 50 terms between.
    bound = (3 * torch.finfo(dtype).eps + WIDTH * torch.finfo(torch.float32).eps) * twin.abs().max()
    assert (found - twin).abs().max() <= bound
    assert (found - module(x, (expert_ids + 1) % NUM_EXPERTS, shares)).abs().max() > 10 * bound


@each_dtype
def test_tokens_do_not_depend_on_their_neighbours(dtype):
    module, expert_ids = module_of(dtype), random_choices(40, 2, seed=5)
    expert_ids[20:, 0] = 2  # more than a tile of one expert
    x, shares = randn(40, WIDTH, seed=6, dtype=dtype), randn(40, 2, seed=7).abs()
    together = module(x, expert_ids, shares)
    assert len({tuple(row) for row in together.tolist()}) == 40
    for first, count in ((0, 1), (7, 1), (21, 1), (39, 1), (0, 2), (5, 15), (3, 16), (18, 17)):
        part = slice(first, first + count)
        assert torch.equal(module(x[part], expert_ids[part], shares[part]), together[part]), (first, count)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(8)).to(DEVICE)
    assert torch.equal(module(x[order], expert_ids[order], shares[order]), together[order])


@each_dtype
def test_what_is_not_finite_stays_in_its_token(dtype):
    module, expert_ids = module_of(dtype), random_choices(20, 2, seed=9)
    x, shares = randn(20, WIDTH, seed=10, dtype=dtype), randn(20, 2, seed=11).abs()
    expected = module(x, expert_ids, shares)
    x[4] = torch.nan
    found = module(x, expert_ids, shares)
    assert found[4].isnan().all()
    others = [i for i in range(20) if i != 4]
    assert torch.equal(found[others], expected[others])


@each_dtype
@pytest.mark.parametrize("part", ["gate", "up"])
def test_limits_do_not_turn_nan_into_a_number(dtype, part):
    """A minimum on a GPU takes the other operand for NaN, and the request would get an answer in place of an error."""
    module, expert_ids = module_of(dtype), random_choices(20, 2, seed=9)
    x, shares = randn(20, WIDTH, seed=10, dtype=dtype), randn(20, 2, seed=11).abs()
    module.w13[3, slice(None, INNER) if part == "gate" else slice(INNER, None)] = torch.nan
    chosen = (expert_ids == 3).any(1)
    assert chosen.any() and torch.equal(module(x, expert_ids, shares).isnan().all(1), chosen)


def test_choices_are_added_in_the_tokens_own_order():
    """Float32 sums of three numbers of different size depend on their order."""
    module, expert_ids = module_of(torch.float32), random_choices(12, 3, seed=12)
    x, shares = randn(12, WIDTH, seed=13), torch.tensor([1e4, 1.0, -1e4], device=DEVICE).expand(12, 3)
    outputs = gpu.expert_outputs(x, expert_ids, module.w13, module.w2, LIMIT) * shares.unsqueeze(-1)
    expected = (outputs[:, 0] + outputs[:, 1]) + outputs[:, 2]
    assert torch.equal(module(x, expert_ids, shares), expected)
    assert not torch.equal(outputs[:, 0] + (outputs[:, 1] + outputs[:, 2]), expected)


def test_a_tile_writes_its_own_choices_only():
    """In the interpreter the next tile, which comes later, would put right what it had overwritten."""
    w13, w2 = weights(torch.float32)
    expert_ids = torch.tensor([[0], [1], [0], [1], [2]], device=DEVICE)
    x, tiles = randn(5, WIDTH, seed=14), TILES[torch.float32]
    expected = gpu.expert_outputs(x, expert_ids, w13, w2, LIMIT)[:, 0]
    cut = experts.choice_tiles(expert_ids, NUM_EXPERTS, tiles["BLOCK_M"])
    hidden, out = torch.full((5, INNER), 9.0, device=DEVICE), torch.full((5, WIDTH), 9.0, device=DEVICE)
    num_tiles, columns = len(cut.experts), [-(-size // tiles["BLOCK_N"]) for size in (INNER, WIDTH)]
    for tile, (own, places) in enumerate((([0, 2], [0, 1]), ([1, 3], [2, 3]), ([4], [4]))):
        # One tile of choices alone: the others look as if they were past the last.
        alone = torch.where(torch.arange(num_tiles, device=DEVICE) == tile, cut.experts, NUM_EXPERTS)
        lone = cut._replace(experts=alone)
        sizes = num_tiles, NUM_EXPERTS, 1, WIDTH, INNER
        before = hidden.clone(), out.clone()
        experts.gate_up_kernel[(num_tiles * columns[0],)](x, w13, hidden, *lone, *sizes, LIMIT, **tiles)
        experts.down_kernel[(num_tiles * columns[1],)](
            hidden, w2, out, *lone, num_tiles, NUM_EXPERTS, WIDTH, INNER, **tiles
        )  # fmt: skip
        for old, new, expected_rows in zip(before, (hidden, out), (places, own), strict=True):
            assert (old != new).any(1).nonzero().flatten().tolist() == expected_rows
    assert torch.equal(out, expected)


def test_packed_experts_take_the_torch_form():
    """They are expanded one at a time: all at once would be what packing is to avoid."""
    module, (w13, w2) = module_of(torch.float32), weights(torch.float32)
    codes = torch.arange(NUM_EXPERTS, dtype=torch.uint8, device=DEVICE).view(-1, 1)
    for name, values in (("w13", w13), ("w2", w2)):
        delattr(module, name)
        expand = lambda codes, scales, dtype, values=values: values[codes.long()].to(dtype)  # noqa: E731
        setattr(module, name, Packed(codes, codes, 0, torch.float32, expand))
    x, expert_ids, shares = randn(4, WIDTH, seed=15), random_choices(4, 2), randn(4, 2, seed=16).abs()
    found, expected = module(x, expert_ids, shares), module_of(torch.float32)(x, expert_ids, shares)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@each_dtype
def test_no_tokens(dtype):
    module, x = module_of(dtype), randn(0, WIDTH, dtype=dtype)
    expert_ids = torch.zeros(0, 3, dtype=torch.int64, device=DEVICE)
    by_choice = gpu.expert_outputs(x, expert_ids, module.w13, module.w2, LIMIT)
    assert by_choice.shape == (0, 3, WIDTH) and by_choice.dtype == dtype
    assert module(x, expert_ids, randn(0, 3)).shape == (0, WIDTH)


@pytest.mark.parametrize("name", CHOICES)
def test_tiles_cover_every_choice_once(name):
    expert_ids, block = CHOICES[name], 4
    cut = experts.choice_tiles(expert_ids, NUM_EXPERTS, block)
    flat, found = expert_ids.flatten(), []
    for expert, first in zip(cut.experts.tolist(), cut.firsts.tolist(), strict=True):
        if expert < NUM_EXPERTS:
            places = cut.order[first : min(first + block, int(cut.ends[expert]))]
            assert len(places) and (flat[places] == expert).all()
            found += places.tolist()
    assert sorted(found) == list(range(flat.numel()))
    for expert in range(NUM_EXPERTS):
        own = [place for place in found if flat[place] == expert]
        assert own == sorted(own), "an expert's choices keep the tokens' order"


def test_the_bound_on_tiles_is_reached():
    """A bound that is too small would drop choices of the last experts."""
    # One full tile and a single choice for each of three experts: 3 · 2 tiles.
    expert_ids = torch.arange(3, device=DEVICE).repeat_interleave(5).unsqueeze(1)
    cut = experts.choice_tiles(expert_ids, 3, 4)
    assert len(cut.experts) == 6 and (cut.experts < 3).all()


@pytest.mark.parametrize("fault", ["width", "experts", "strides", "dtype"])
def test_operands_that_do_not_fit_are_refused(fault):
    (w13, w2), x = weights(torch.float32), randn(2, WIDTH)
    if fault == "width":
        x = x[:, :-1]
    elif fault == "experts":
        w13 = w13[1:]
    elif fault == "strides":
        w2 = w2.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        x = x.bfloat16()
    with pytest.raises(InvariantError):
        gpu.expert_outputs(x, random_choices(2, 3), w13, w2, LIMIT)
