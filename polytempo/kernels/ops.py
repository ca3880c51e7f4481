"""Single kernels on tensors; twins: model.ops.linear, engine.sampling.greedy, engine.noise.uniform and RMSNorm."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from polytempo.errors import InvariantError
from polytempo.kernels.structs import PLAIN, Matrix
from polytempo.kernels.threads import kernel_threads


def check_operand(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
    """Refuse what a kernel would read wrongly.

    Args:
        name: for the message.
        tensor: an argument.
        dtype: what it must be; None: float32 or bfloat16.

    Raises:
        InvariantError: it is not on the CPU, not contiguous, or of another dtype.
    """
    dtypes = (torch.float32, torch.bfloat16) if dtype is None else (dtype,)
    if tensor.device.type != "cpu" or tensor.dtype not in dtypes or not tensor.is_contiguous():
        raise InvariantError(
            f"kernel operand {name!r} is {tensor.dtype} on {tensor.device}, strides {tensor.stride()} for shape "
            f"{tuple(tensor.shape)}; it must be contiguous, on the CPU and {' or '.join(map(str, dtypes))}"
        )


def linear(library: ctypes.CDLL, x: Tensor, weight: Tensor, threads: int | None = None) -> Tensor:
    """x @ weight.T; a row's result is a function of that row alone, whatever the number of rows or threads.

    Args:
        library: from `build.load`.
        x: [M, K], M >= 0, float32 or bfloat16, contiguous.
        weight: [N, K], same dtype, contiguous.
        threads: most threads; None: as many as torch.

    Returns:
        [M, N].

    Raises:
        InvariantError: an operand that the kernel would read wrongly.
    """
    check_operand("x", x)
    check_operand("weight", weight, x.dtype)
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise InvariantError(f"kernel linear got x {tuple(x.shape)} and weight {tuple(weight.shape)}")
    return linear_by(library, x, Matrix(weight.data_ptr(), None, PLAIN), weight.shape[0], threads)


def linear_by(library: ctypes.CDLL, x: Tensor, matrix: Matrix, width: int, threads: int | None = None) -> Tensor:
    """As `linear`, by a matrix of any kind.

    Args:
        library: from `build.load`.
        x: [M, K], M >= 0, float32 or bfloat16, contiguous.
        matrix: [width, K], in x's dtype if it is plain; trusted to be what it says.
        width: N.
        threads: most threads; None: as many as torch.

    Returns:
        [M, N].

    Raises:
        InvariantError: x is not what the kernel reads.
    """
    check_operand("x", x)
    rows, depth = x.shape
    out = x.new_empty(rows, width)
    library.pt_linear(x.data_ptr(), ctypes.byref(matrix), out.data_ptr(), rows, depth, width,
                      x.dtype == torch.bfloat16, threads or kernel_threads())  # fmt: skip
    return out


def greedy(library: ctypes.CDLL, x: Tensor) -> Tensor:
    """Where each row is highest; twin: engine.sampling.greedy.

    Args:
        library: from `build.load`.
        x: [M, N], N >= 1, float32 or bfloat16, contiguous.

    Returns:
        [M] int64, the lowest index among equals; −1 for a row with NaN or +inf, or with nothing above −inf.

    Raises:
        InvariantError: x is not what the kernel reads.
    """
    check_operand("x", x)
    rows, width = x.shape
    ids = torch.empty(rows, dtype=torch.int64)
    library.pt_greedy(x.data_ptr(), ids.data_ptr(), rows, width, x.dtype == torch.bfloat16, kernel_threads())
    return ids


def uniform(library: ctypes.CDLL, seeds: Tensor, choices: Tensor, positions: Tensor, num_groups: int) -> Tensor:
    """Random numbers of all tokens; twin, with the same bits: engine.noise.uniform.

    Args:
        library: from `build.load`.
        seeds: [N] int64, contiguous, as choices and positions.
        choices: [N] int64.
        positions: [N] int64.
        num_groups: G.

    Returns:
        [N, 4 G] float64.

    Raises:
        InvariantError: an operand that the kernel would read wrongly.
    """
    for name, operand in (("seeds", seeds), ("choices", choices), ("positions", positions)):
        check_operand(name, operand, torch.int64)
    if seeds.dim() != 1 or not seeds.shape == choices.shape == positions.shape:
        shapes = [tuple(operand.shape) for operand in (seeds, choices, positions)]
        raise InvariantError(f"kernel uniform got seeds, choices and positions of shapes {shapes}")
    out = torch.empty(len(seeds), 4 * num_groups, dtype=torch.float64)
    library.pt_uniform(seeds.data_ptr(), choices.data_ptr(), positions.data_ptr(), out.data_ptr(), len(seeds),
                       num_groups, kernel_threads())  # fmt: skip
    return out


def rms_norm(library: ctypes.CDLL, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x) over the last dimension, in float32, returned in x's dtype.

    Args:
        library: from `build.load`.
        x: [..., N] float32 or bfloat16, contiguous.
        weight: [N] float32.
        eps: added to the mean square.

    Returns:
        As x.

    Raises:
        InvariantError: an operand that the kernel would read wrongly.
    """
    check_operand("x", x)
    check_operand("weight", weight, torch.float32)
    if weight.shape != x.shape[-1:]:
        raise InvariantError(f"kernel rms_norm got x {tuple(x.shape)} and weight {tuple(weight.shape)}")
    out, width = torch.empty_like(x), x.shape[-1]
    library.pt_rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps,
                        x.dtype == torch.bfloat16)  # fmt: skip
    return out


def exp(library: ctypes.CDLL, x: Tensor) -> Tensor:
    """The kernels' exp: 0 below -87, constant above 88.

    Args:
        library: from `build.load`.
        x: float32, contiguous.

    Returns:
        As x.

    Raises:
        InvariantError: an operand that the kernel would read wrongly.
    """
    check_operand("x", x, torch.float32)
    out = torch.empty_like(x)
    library.pt_exp(x.data_ptr(), out.data_ptr(), x.numel())
    return out
