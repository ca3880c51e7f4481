"""RMS norms in tiles of whole rows; twins: model.ops.RMSNorm and model.ops.unweighted_rms_norm."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from polytempo.gpu import grid

TILE_ELEMENTS, MAX_ROWS = 4096, 32
"""Elements that a program has at a time, and most rows among them: the size of a row alone decides a tile's shape."""


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x, weight, out, num_rows, size, eps, HAS_WEIGHT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """BLOCK_ROWS rows: squares are added lane by lane in ascending blocks, then the lanes in the compiler's tree."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    starts, is_row = rows.to(tl.int64) * size, rows < num_rows
    squares = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    for first in range(0, size, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = is_row[:, None] & (columns < size)[None, :]
        part = tl.load(x + starts[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += part * part
    scale = tl.rsqrt(tl.sum(squares, 1) / size + eps)
    for first in range(0, size, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = is_row[:, None] & (columns < size)[None, :]
        part = tl.load(x + starts[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        scaled = part * scale[:, None]
        if HAS_WEIGHT:
            scaled = tl.load(weight + columns, mask=columns < size, other=0.0)[None, :] * scaled
        tl.store(out + starts[:, None] + columns[None, :], scaled.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """x / rms(x) over the last dimension, times a weight.

    Args:
        x: [..., size], float32 or bfloat16.
        eps: added to the mean square.
        weight: [size] float32, or None.

    Returns:
        As x, contiguous; computed in float32. Each row is a function of that row alone.
    """
    x = x.contiguous()
    out, size = x.new_empty(x.shape), x.shape[-1]
    num_rows = x.numel() // size
    block = min(TILE_ELEMENTS, triton.next_power_of_2(size))
    block_rows = min(MAX_ROWS, TILE_ELEMENTS // block)
    grid.launch(
        rms_norm_kernel, triton.cdiv(num_rows, block_rows), x, x if weight is None else weight, out, num_rows, size,
        eps, HAS_WEIGHT=weight is not None, BLOCK_ROWS=block_rows, BLOCK=block,
    )  # fmt: skip
    return out
