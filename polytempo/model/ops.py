"""Operators whose result for one row does not depend on how many rows stand beside it.

Token identity over many tokens needs bit-identical logits (design: exactness), and a batch hands the same
row to a kernel beside any number of others. Matrix kernels change their order of summation at few rows, so
`linear` and `matmul` never show them fewer than `min_rows`; reductions that we own are written out as a
fixed tree; activations use forms built from exp, whose flat tail was measured to equal its body.
`make invariance` measures all of this on the machine at hand. On a GPU, products and norms are Triton kernels where
there is Triton: what is written here is their twin.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polytempo import gpu
from polytempo.engine_config import AUTO, TORCH, TRITON
from polytempo.errors import ConfigError
from polytempo.gpu.available import has_triton_or_note, missing_triton

P, R = ParamSpec("P"), TypeVar("R")

# Measured with torch 2.13 on AVX-512 at 1 and 2 threads, on inputs that cancel so that the order of summation
# shows in every result: fp32 rows differ at 1, 2, 3 rows (on other machines up to 11). bf16 rows differ at 1 row
# for K >= 2048, and wherever rows · K · N <= 4096, up to which torch leaves oneDNN for a kernel of its own.
FP32_MIN_ROWS = 16
BF16_MIN_ROWS = 2
BF16_MAX_SMALL_WORK = 4096
# What padding rows hold. They are computed and dropped; a test sets this to NaN to prove that nothing reads them.
PADDING_VALUE = 0.0
# Where the Triton kernels run. Tests add "cpu", where Triton's interpreter takes the place of a GPU.
TRITON_DEVICES = {"cuda"}
TRITON_DTYPES = (torch.float32, torch.bfloat16)
_chosen_kernels: ContextVar[str] = ContextVar("chosen_kernels", default=AUTO)


def by_own_kernels(call: Callable[P, R]) -> Callable[P, R]:
    """Make a call, whose first argument is a model, run on that model's choice of kernels.

    Args:
        call: a function of a DeepseekV4, or a method of one.

    Returns:
        The same, during which `uses_triton` heeds the choice.
    """

    @wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _chosen_kernels.set(args[0].kernels)
        try:
            return call(*args, **kwargs)
        finally:
            _chosen_kernels.reset(token)

    return run


def uses_triton(x: Tensor) -> bool:
    """Whether the Triton kernels compute with x: on a GPU, without gradients, unless the model chose torch.

    Where there is no Triton, one warning says so.
    """
    if x.device.type not in TRITON_DEVICES or x.dtype not in TRITON_DTYPES or torch.is_grad_enabled():
        return False
    return _chosen_kernels.get() != TORCH and has_triton_or_note()


def require_triton(device: torch.device) -> None:
    """Refuse kernels="triton" where there are none.

    Args:
        device: of the model.

    Raises:
        ConfigError: it is no GPU, or Triton is missing.
    """
    reason = missing_triton()
    if device.type not in TRITON_DEVICES:
        reason = f"the model is on {device}; the Triton kernels run on a GPU"
    if reason:
        raise ConfigError(f"option 'kernels' is {TRITON!r}, but {reason}; use 'auto' or 'torch'")


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
    if uses_triton(x):
        return gpu.linear(x, weight)
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
    if uses_triton(a):
        return gpu.matmul(a, b)
    num_rows = a.shape[1]
    needed = min_rows(a.dtype, b.shape[1], b.shape[2])
    if num_rows >= needed:
        return torch.matmul(a, b)
    return torch.matmul(pad_rows(a, needed), b)[:, :num_rows]


def top_ids(scores: Tensor, count: int) -> Tensor:
    """Ids of each row's `count` highest scores, highest first.

    Args:
        scores: [N, E] float32.
        count: 1 … E.

    Returns:
        [N, count] int64. On the CPU, which of several equal scores comes first depends on E alone; elsewhere it is
        the lowest id, since torch chooses between kernels there by the number of rows.
    """
    if scores.device.type == "cpu":
        return scores.topk(count, dim=-1).indices
    return top_ids_by_sort(scores, count)


def top_ids_by_sort(scores: Tensor, count: int) -> Tensor:
    """`top_ids` on any device, of equal scores the lowest id first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


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


def prefix_sum(x: Tensor) -> Tensor:
    """Sums from each row's first element to every other one.

    Args:
        x: [N, K].

    Returns:
        [N, K]; a sum is a function of its terms alone, and zeros after them do not change it. Off the CPU, torch's
        own `cumsum` divides rows among threads by the number of rows, and takes another kernel for a single one.
    """
    return x.cumsum(-1) if x.device.type == "cpu" else prefix_sum_by_halves(x)


def prefix_sum_by_halves(x: Tensor) -> Tensor:
    """`prefix_sum` on any device: within aligned blocks of 2, 4, 8, …, a right half gets its left half's total."""
    width, span = x.shape[-1], 1
    x = F.pad(x, (0, (1 << (width - 1).bit_length()) - width))
    while span < x.shape[-1]:
        left, right = x.unflatten(-1, (-1, 2, span)).unbind(-2)
        x = torch.stack((left, right + left[..., -1:]), -2).flatten(-3)
        span *= 2
    return x[..., :width]


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
    if uses_triton(x):
        return gpu.rms_norm(x, eps)
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
        if uses_triton(x):
            return gpu.rms_norm(x, self.eps, self.weight)
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
