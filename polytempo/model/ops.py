"""Operators whose result for one row does not depend on how many rows stand beside it.

Token identity over many tokens needs bit-identical logits (design: exactness), and a batch hands the same
row to a kernel beside any number of others. Matrix kernels change their order of summation at few rows, so
`linear` and `matmul` never show them fewer than `min_rows`; reductions that we own are written out as a
fixed tree; activations use forms built from exp, whose flat tail was measured to equal its body.
`make invariance` measures all of this on the machine at hand.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Measured with torch 2.13 on AVX-512 at 1 and 2 threads, on inputs that cancel so that the order of summation
# shows in every result: fp32 rows differ at 1, 2, 3 rows (on other machines up to 11). bf16 rows differ at 1 row
# for K >= 2048, and wherever rows · K · N <= 4096, up to which torch leaves oneDNN for a kernel of its own.
FP32_MIN_ROWS = 16
BF16_MIN_ROWS = 2
BF16_MAX_SMALL_WORK = 4096
# What padding rows hold. They are computed and dropped; a test sets this to NaN to prove that nothing reads them.
PADDING_VALUE = 0.0


def min_rows(dtype: torch.dtype, depth: int, width: int) -> int:
    """Fewest rows at which a matrix kernel is known to be row-invariant.

    Args:
        dtype: of both factors.
        depth: K, the summed dimension.
        width: N, columns of the result.

    Returns:
        Rows to show the kernel at least.
    """
    if dtype == torch.float32:
        return FP32_MIN_ROWS
    return max(BF16_MIN_ROWS, BF16_MAX_SMALL_WORK // max(depth * width, 1) + 1)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """Append padding rows to [..., M, K] until M == rows; a no-op if M is already that large."""
    missing = rows - x.shape[-2]
    return x if missing <= 0 else F.pad(x, (0, 0, 0, missing), value=PADDING_VALUE)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Row-invariant x @ weight.T.

    Args:
        x: [M, K], M >= 0.
        weight: [N, K], same dtype.

    Returns:
        [M, N]; row i is a function of x[i] alone.
    """
    num_rows = x.shape[0]
    needed = min_rows(x.dtype, weight.shape[1], weight.shape[0])
    if num_rows >= needed:
        return F.linear(x, weight)
    return F.linear(pad_rows(x, needed), weight)[:num_rows]


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Row-invariant batched a @ b.

    Args:
        a: [B, M, K].
        b: [B, K, N], same dtype.

    Returns:
        [B, M, N]; each row is a function of its own row of `a` and its own b alone.
    """
    num_rows = a.shape[1]
    needed = min_rows(a.dtype, b.shape[1], b.shape[2])
    if num_rows >= needed:
        return torch.matmul(a, b)
    return torch.matmul(pad_rows(a, needed), b)[:, :num_rows]


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over one dimension in a fixed order, by halving.

    Args:
        x: any shape; the size of `dim` must be a power of two.
        dim: dimension to reduce, non-negative.

    Returns:
        x without that dimension.
    """
    size = x.shape[dim]
    while size > 1:
        size //= 2
        x = x.narrow(dim, 0, size) + x.narrow(dim, size, size)
    return x.squeeze(dim)


def serial_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over one (small) dimension from its first index to its last."""
    parts = x.unbind(dim)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)): torch.sigmoid takes another path in a flat tail."""
    return 1.0 / (1.0 + torch.exp(-x))


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(log(1 + exp(x))), the family's router activation (config field `scoring_func`)."""
    return torch.sqrt(x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs())))


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """SiLU(gate) * up in float32, gate clamped above and up on both sides (config field `swiglu_limit`)."""
    gate, up = gate.float().clamp(max=limit), up.float().clamp(min=-limit, max=limit)
    return gate * sigmoid(gate) * up


def unweighted_rms_norm(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, computed in float32, returned in x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    """weight * x / rms(x) over the last dimension, computed in float32, returned in x's dtype."""

    def __init__(self, size: int, eps: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., size]."""
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps))).to(x.dtype)


class Linear(nn.Module):
    """A bias-free projection through the row-invariant `linear`; weight [out, in]."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device | str | None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Project x [M, in] to [M, out]."""
        return linear(x, self.weight)
