"""All chosen experts of all tokens in two launches, without a word to the host; twin: model.moe.Experts.

Choices (a token and one of its experts) are sorted by expert, and each expert's choices are cut into tiles of the
shape that all products have. How many tiles an expert needs is known on the device only, so the launches start as
many programs as there could be tiles, and those past the last return at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from polytempo.errors import InvariantError
from polytempo.gpu import grid
from polytempo.gpu.products import TILES, check_operands, tile_product


class ChoiceTiles(NamedTuple):
    """Choices sorted by expert, and the tiles that they are cut into. All [...] int64 on the device.

    Attributes:
        order: [C], the choices, token · top_k + place, those of the lowest expert first.
        ends: [E], where each expert's choices end in `order`.
        experts: [G], each tile's expert; E for a tile past the last.
        firsts: [G], each tile's first place in `order`.
    """

    order: Tensor
    ends: Tensor
    experts: Tensor
    firsts: Tensor


def choice_tiles(expert_ids: Tensor, num_experts: int, block: int) -> ChoiceTiles:
    """Sort choices and cut them into tiles, on the device alone.

    Args:
        expert_ids: [T, top_k] int64.
        num_experts: E.
        block: choices per tile.

    Returns:
        ChoiceTiles; G is a bound that follows from T, top_k and E.
    """
    chosen, order = expert_ids.flatten().sort(stable=True)
    every = torch.arange(num_experts, device=chosen.device)
    starts, ends = torch.searchsorted(chosen, every), torch.searchsorted(chosen, every, right=True)
    num_tiles = (ends - starts + block - 1) // block
    tile_ends = num_tiles.cumsum(0)
    # Each expert has at most one tile that is not full, and no tile is empty.
    bound = min(chosen.numel(), chosen.numel() // block + num_experts)
    tiles = torch.arange(bound, device=chosen.device)
    experts = torch.searchsorted(tile_ends, tiles, right=True)
    owner = experts.clamp(max=num_experts - 1)
    firsts = starts.gather(0, owner) + (tiles - (tile_ends - num_tiles).gather(0, owner)) * block
    return ChoiceTiles(order, ends, experts, firsts)


@triton.jit
def tile_choices(order, ends, expert, tile_firsts, tile, BLOCK_M: tl.constexpr):
    """The choices of a tile that is not past the last.

    Args:
        order: of ChoiceTiles.
        ends: of ChoiceTiles.
        expert: the tile's.
        tile_firsts: of ChoiceTiles.
        tile: which one.
        BLOCK_M: choices per tile.

    Returns:
        [BLOCK_M] each: places in `order`, which of them are the tile's own, and their choices, 0 where they are not.
    """
    places = tl.load(tile_firsts + tile) + tl.arange(0, BLOCK_M)
    is_own = places < tl.load(ends + expert)
    return places, is_own, tl.load(order + places, mask=is_own, other=0)


@triton.jit(do_not_specialize=["num_tiles"])
def gate_up_kernel(
    x, w13, hidden, order, ends, tile_experts, tile_firsts, num_tiles, num_experts, top_k, width, inner, limit,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of hidden [C, I]: SwiGLU of both projections of a tile of choices, in sorted order."""
    tile, column_tile = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    expert = tl.load(tile_experts + tile)
    if expert >= num_experts:
        return
    places, is_own, choices = tile_choices(order, ends, expert, tile_firsts, tile, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_columns = w13 + (expert * 2 * inner + columns) * width
    rows, in_width = x + choices // top_k * width, columns < inner
    gate = tile_product(rows, is_own, 1, gate_columns, in_width, 1, width, BLOCK_M, BLOCK_N, BLOCK_K)
    up = tile_product(
        rows, is_own, 1, gate_columns + inner * width, in_width, 1, width, BLOCK_M, BLOCK_N, BLOCK_K
    )  # fmt: skip
    # Rounded as the projections of the twin are. `where` keeps a NaN, which `minimum` would turn into the limit.
    gate, up = gate.to(x.dtype.element_ty).to(tl.float32), up.to(x.dtype.element_ty).to(tl.float32)
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    activated = gate * (1.0 / (1.0 + tl.exp(-gate))) * up
    tl.store(
        hidden + places[:, None] * inner + columns[None, :], activated.to(x.dtype.element_ty),
        mask=is_own[:, None] & in_width[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles"])
def down_kernel(
    hidden, w2, out, order, ends, tile_experts, tile_firsts, num_tiles, num_experts, width, inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of out [C, D], each result at its choice's own place."""
    tile, column_tile = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    expert = tl.load(tile_experts + tile)
    if expert >= num_experts:
        return
    places, is_own, choices = tile_choices(order, ends, expert, tile_firsts, tile, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tile_product(
        hidden + places * inner, is_own, 1, w2 + (expert * width + columns) * inner, columns < width, 1, inner,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    tl.store(
        out + choices[:, None] * width + columns[None, :], total.to(out.dtype.element_ty),
        mask=is_own[:, None] & (columns < width)[None, :],
    )  # fmt: skip


def expert_outputs(x: Tensor, expert_ids: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    """What each token's experts make of it, before weights.

    Args:
        x: [T, D], T >= 0, float32 or bfloat16.
        expert_ids: [T, top_k] int64, 0 … E − 1.
        w13: [E, 2·I, D], gate rows and then up rows, same dtype, contiguous.
        w2: [E, D, I], same dtype, contiguous.
        limit: of SwiGLU (config field `swiglu_limit`).

    Returns:
        [T, top_k, D] in x's dtype; an output is a function of its token and its expert alone.

    Raises:
        InvariantError: the operands do not fit each other.
    """
    check_operands(x, w13, w2)
    (num_tokens, top_k), (num_experts, width, inner) = expert_ids.shape, w2.shape
    if x.shape != (num_tokens, width) or w13.shape != (num_experts, 2 * inner, width):
        raise InvariantError(
            f"Triton experts got x {tuple(x.shape)}, expert_ids {tuple(expert_ids.shape)}, w13 {tuple(w13.shape)} and "
            f"w2 {tuple(w2.shape)}"
        )
    if not w13.is_contiguous() or not w2.is_contiguous():
        raise InvariantError(f"Triton experts got weights of strides {w13.stride()} and {w2.stride()}")
    out = x.new_empty(num_tokens, top_k, width)
    if not out.numel():
        return out
    x, tiles = x.contiguous(), TILES[x.dtype]
    cut = choice_tiles(expert_ids, num_experts, tiles["BLOCK_M"])
    hidden, num_tiles = x.new_empty(num_tokens * top_k, inner), len(cut.experts)
    grid.launch(
        gate_up_kernel, num_tiles * triton.cdiv(inner, tiles["BLOCK_N"]),
        x, w13, hidden, *cut, num_tiles, num_experts, top_k, width, inner, limit, **tiles,
    )  # fmt: skip
    grid.launch(
        down_kernel, num_tiles * triton.cdiv(width, tiles["BLOCK_N"]),
        hidden, w2, out, *cut, num_tiles, num_experts, width, inner, **tiles,
    )  # fmt: skip
    return out
