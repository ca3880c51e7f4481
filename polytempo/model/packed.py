"""Weights kept as a checkpoint stores them, and expanded when they are used: twin of kernels/packed.h."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from polytempo.model.ops import linear

Expand = Callable[[Tensor, Tensor, torch.dtype], Tensor]
"""Codes and scales, both uint8, to values in a dtype."""


class Packed(nn.Module):
    """A matrix, or a stack of them, in the bytes of its checkpoint.

    What it stores is uint8, which no `to(dtype)` touches; a buffer without elements is cast in its place.

    Args:
        codes: [..., R, bytes of a row] uint8.
        scales: [..., row blocks, column blocks] uint8 exponent bytes.
        kind: what they are, one of kernels.structs.
        dtype: of the values.
        expand: reads them.
    """

    def __init__(self, codes: Tensor, scales: Tensor, kind: int, dtype: torch.dtype, expand: Expand) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=codes.device), persistent=False)
        self.kind, self._expand = kind, expand

    @property
    def dtype(self) -> torch.dtype:
        """Of the values; follows `to(dtype)`."""
        return self.like.dtype

    def __len__(self) -> int:
        """Matrices in a stack."""
        return len(self.codes)

    def __getitem__(self, index: int) -> Tensor:
        """Values of one matrix of a stack; its parts one below the other: [rows, columns]."""
        return self._expand(self.codes[index], self.scales[index], self.dtype).flatten(0, -2)

    def expand(self) -> Tensor:
        """Values of everything: [..., R, columns]."""
        return self._expand(self.codes, self.scales, self.dtype)


class PackedLinear(nn.Module):
    """As `ops.Linear`, over a packed matrix: `weight` is expanded anew each time, and nothing can train it."""

    def __init__(self, stored: Packed) -> None:
        super().__init__()
        self.stored = stored

    @property
    def weight(self) -> Tensor:
        """[out, in] in the model's dtype."""
        return self.stored.expand()

    def forward(self, x: Tensor) -> Tensor:
        """Project x [M, in] to [M, out]."""
        return linear(x, self.weight)
