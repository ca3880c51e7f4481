"""What the tests of the Triton kernels share: where they run, and bfloat16 in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed (it has wheels for Linux alone)")

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def make_interpreter_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter compute in bfloat16 as GPUs do.

    It multiplies the bit patterns of bfloat16 operands as if they were integers, and cuts where hardware rounds to
    nearest even (3.7.1 and 3.9.0).
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    multiply, cast = builder.create_dot, builder.cast_impl

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *arguments):
        return multiply(self, widened(a), widened(b), *arguments)

    def cast_impl(self, handle, wanted):
        if handle.dtype.scalar == tl.bfloat16 and wanted.scalar == tl.float32:
            return widened(handle)
        if handle.dtype.scalar == tl.float32 and wanted.scalar == tl.bfloat16:
            values = np.ascontiguousarray(handle.data, dtype=np.float32)
            bits = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
            return interpreter.TensorHandle(bits.reshape(handle.data.shape), tl.bfloat16)
        return cast(self, handle, wanted)

    monkeypatch.setattr(builder, "create_dot", create_dot)
    monkeypatch.setattr(builder, "cast_impl", cast_impl)


def make_interpreter_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out checks of overflow, and the setup for `tl` that the interpreter repeats when a kernel calls ours."""
    from triton.runtime import interpreter

    shared = interpreter.interpreter_builder
    monkeypatch.setattr(shared, "options", replace(shared.options, sanitize_overflow=False))
    set_up_and_call = interpreter.InterpretedFunction.__call__

    def call(self, *arguments, **constants):
        if self.fn.__module__.startswith("polytempo."):
            return self.rewrite()(*arguments, **constants)
        return set_up_and_call(self, *arguments, **constants)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def close_to_exact(found: Tensor, exact: Tensor, size: Tensor, depth: int) -> bool:
    """Whether a product is as near to the exact one as float32 sums and one rounding allow.

    Args:
        found: in its dtype.
        exact: in float64.
        size: the sum of the absolute terms of each element, in float64.
        depth: terms of each sum.
    """
    unit = torch.finfo(found.dtype).eps / 2
    bound = depth * torch.finfo(torch.float32).eps * size + unit * exact.abs()
    return bool(((found.double() - exact).abs() <= bound + 1e-30).all())
