"""The one place where kernels are started."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from triton.runtime.jit import KernelInterface


def launch(kernel: KernelInterface, num_programs: int, first: Tensor, *arguments: object, **constants: int) -> None:
    """Start a kernel on the device of its operands, which need not be the current one.

    Args:
        kernel: a jitted function.
        num_programs: how many; 0 starts nothing.
        first: its first argument.
        arguments: the others.
        constants: its constexprs, and options of the compiler.
    """
    if num_programs:
        with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
            kernel[(num_programs,)](first, *arguments, **constants)
