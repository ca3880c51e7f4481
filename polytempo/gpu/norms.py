"""RMS norms, one program per row; twins: model.ops.RMSNorm and model.ops.unweighted_rms_norm."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from polytempo.gpu.launch import launch

MAX_BLOCK = 1024
"""Most columns of a row that are read at once."""


@triton.jit
def rms_norm_kernel(x, weight, out, size, eps, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """One row: squares are added lane by lane in ascending blocks, then the lanes in the compiler's fixed tree."""
    row = tl.program_id(0).to(tl.int64) * size
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(x + row + columns, mask=columns < size, other=0.0).to(tl.float32)
        squares += part * part
    scale = tl.rsqrt(tl.sum(squares, 0) / size + eps)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        scaled = tl.load(x + row + columns, mask=columns < size, other=0.0).to(tl.float32) * scale
        if HAS_WEIGHT:
            scaled = tl.load(weight + columns, mask=columns < size, other=0.0) * scaled
        tl.store(out + row + columns, scaled.to(out.dtype.element_ty), mask=columns < size)


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
    block = min(MAX_BLOCK, triton.next_power_of_2(size))
    num_rows = x.numel() // size
    launch(
        rms_norm_kernel, num_rows, x, x if weight is None else weight, out, size, eps,
        HAS_WEIGHT=weight is not None, BLOCK=block,
    )  # fmt: skip
    return out
