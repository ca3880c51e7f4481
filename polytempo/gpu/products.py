"""Matrix products in tiles of one fixed shape; twins: model.ops.linear and model.ops.matmul.

An output element is one float32 sum over K in ascending blocks, in a tile whose shape depends on the dtype alone. How
many rows there are decides how many tiles run, never what happens in one: there is no split of K, no choice among
kernels and no tuning. Rows, columns and K beyond the end are read as zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polytempo.errors import InvariantError
from polytempo.gpu import grid

TILES = {
    torch.float32: {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32},
    torch.bfloat16: {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128},
}
"""Rows, columns and depth of a tile. A dot takes 16 rows at least."""


@triton.jit
def tile_product(
    a_rows, a_mask, a_step, b_columns, b_mask, b_step, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] float32 of rows [BLOCK_M] of a by columns [BLOCK_N] of b.

    Args:
        a_rows: pointers to the rows' first elements.
        a_mask: which rows there are.
        a_step: elements from one k of a row to the next.
        b_columns: pointers to the columns' first elements.
        b_mask: which columns there are.
        b_step: elements from one k of a column to the next.
        depth: K.
        BLOCK_M: rows of the tile.
        BLOCK_N: columns of the tile.
        BLOCK_K: how much of K is added at a time.
    """
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        in_depth = k < depth
        a = tl.load(a_rows[:, None] + (k * a_step)[None, :], mask=a_mask[:, None] & in_depth[None, :], other=0.0)
        b = tl.load(b_columns[None, :] + (k * b_step)[:, None], mask=in_depth[:, None] & b_mask[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")  # never TF32
    return total


# The number of rows is kept out of specialisation: 1 would become a constant, and a kernel of its own.
@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    a, b, out, num_rows, width, depth,
    a_batch_step, a_row_step, a_step, b_batch_step, b_column_step, b_step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of out [B, M, N] = a [B, M, K] @ b [B, K, N]; neighbouring programs share columns of b."""
    tile = tl.program_id(0)
    row_tiles, column_tiles = (num_rows + BLOCK_M - 1) // BLOCK_M, (width + BLOCK_N - 1) // BLOCK_N
    batch = (tile // (row_tiles * column_tiles)).to(tl.int64)
    rows = (tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tile // row_tiles % column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    total = tile_product(
        a + batch * a_batch_step + rows * a_row_step, rows < num_rows, a_step,
        b + batch * b_batch_step + columns * b_column_step, columns < width, b_step,
        depth, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    places = out + (batch * num_rows + rows[:, None]) * width + columns[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None] & (columns < width)[None, :])


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Row-invariant x @ weight.T.

    Args:
        x: [M, K], M >= 0, float32 or bfloat16, any strides.
        weight: [N, K], same dtype and device.

    Returns:
        [M, N]; row i is a function of x[i] alone.

    Raises:
        InvariantError: the operands do not fit each other.
    """
    if x.dim() != 2 or weight.dim() != 2:
        raise InvariantError(f"Triton linear got x {tuple(x.shape)} and weight {tuple(weight.shape)}")
    return matmul(x.unsqueeze(0), weight.t().unsqueeze(0)).squeeze(0)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Row-invariant batched a @ b.

    Args:
        a: [B, M, K], float32 or bfloat16, any strides.
        b: [B, K, N], same dtype and device, any strides.

    Returns:
        [B, M, N]; each row is a function of its own row of `a` and its own b alone.

    Raises:
        InvariantError: the operands do not fit each other.
    """
    check_operands(a, b)
    if a.dim() != 3 or b.dim() != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise InvariantError(f"Triton product of {tuple(a.shape)} and {tuple(b.shape)}")
    (num_batches, num_rows, depth), width = a.shape, b.shape[2]
    out = a.new_empty(num_batches, num_rows, width)
    tiles = TILES[a.dtype]
    num_tiles = num_batches * triton.cdiv(num_rows, tiles["BLOCK_M"]) * triton.cdiv(width, tiles["BLOCK_N"])
    # A lone batch takes no step: torch's depends on the number of rows, and Triton compiles anew for other kinds.
    a_batch_step, b_batch_step = (a.stride(0), b.stride(0)) if num_batches > 1 else (0, 0)
    grid.launch(
        product_kernel, num_tiles, a, b, out, num_rows, width, depth,
        a_batch_step, a.stride(1), a.stride(2), b_batch_step, b.stride(2), b.stride(1), **tiles,
    )  # fmt: skip
    return out


def check_operands(first: Tensor, *others: Tensor) -> None:
    """Refuse operands that a kernel would read wrongly.

    Args:
        first: an operand.
        others: of the same dtype and device.

    Raises:
        InvariantError: they are not; or there are no tiles for the dtype.
    """
    for other in (first, *others):
        if other.dtype not in TILES or other.dtype != first.dtype or other.device != first.device:
            raise InvariantError(
                f"Triton operands are {first.dtype} on {first.device} and {other.dtype} on {other.device}; they must "
                f"be on one device, all {' or all '.join(map(str, TILES))}"
            )
