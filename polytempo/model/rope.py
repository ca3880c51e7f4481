"""Rotary position embedding: frequencies, tables, and the interleaved rotation of the trailing channels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from polytempo.config import ModelConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, rope_dim: int) -> Tensor:
    """Angular frequency of each channel pair.

    Args:
        rope: base and YaRN parameters.
        rope_dim: rotated channels of a head (config field `qk_rope_head_dim`), even.

    Returns:
        [rope_dim / 2] float32, in radians per position.

    Source: RoFormer (arXiv:2104.09864) eq. 15; YaRN (arXiv:2309.00071) section 3.2, "NTK-by-parts".
    """
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.factor == 1.0:
        return frequencies
    low = math.floor(_pair_of_rotations(rope.beta_fast, rope, rope_dim))
    high = math.ceil(_pair_of_rotations(rope.beta_slow, rope, rope_dim))
    low, high = max(low, 0), min(high, rope_dim - 1)
    width = max(high - low, 0.001)
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)


def _pair_of_rotations(rotations: float, rope: RopeConfig, rope_dim: int) -> float:
    """Channel pair (fractional) that turns `rotations` times over the original context."""
    turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
    return rope_dim * math.log(turns) / (2 * math.log(rope.theta))


@dataclass(frozen=True)
class RopeAngles:
    """cos and sin of some positions, [..., rope_dim / 2] float32 each."""

    cos: Tensor
    sin: Tensor

    def at(self, positions: Tensor) -> RopeAngles:
        """Pick the rows of `positions` (int64, any shape) from a table over positions 0, 1, …"""
        return RopeAngles(self.cos[positions], self.sin[positions])

    def inverse(self) -> RopeAngles:
        """The opposite rotation."""
        return RopeAngles(self.cos, -self.sin)

    def per_head(self) -> RopeAngles:
        """Insert a head dimension before the channels, to rotate [T, heads, channels]."""
        return RopeAngles(self.cos.unsqueeze(-2), self.sin.unsqueeze(-2))


@dataclass(frozen=True)
class RopeTables:
    """Both tables of a model, over positions 0 … num_positions − 1.

    A table makes an angle a function of the position alone, whatever stands beside it in a batch.
    """

    plain: RopeAngles
    compress: RopeAngles

    @classmethod
    def build(cls, config: ModelConfig, num_positions: int, device: torch.device | str = "cpu") -> RopeTables:
        """Compute the tables in float32.

        Args:
            config: the model's shape.
            num_positions: positions covered.
            device: where the tables live.

        Returns:
            The tables, each [num_positions, qk_rope_head_dim / 2].
        """
        return cls(*(_table(rope, config, num_positions, device) for rope in (config.rope, config.compress_rope)))

    def for_ratio(self, ratio: int) -> RopeAngles:
        """Table of a layer with this compress ratio."""
        return self.compress if ratio else self.plain


def _table(rope: RopeConfig, config: ModelConfig, num_positions: int, device: torch.device | str) -> RopeAngles:
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, config.qk_rope_head_dim))
    scale = rope.attention_factor
    return RopeAngles((angles.cos() * scale).to(device), (angles.sin() * scale).to(device))


def rotate(x: Tensor, angles: RopeAngles) -> Tensor:
    """Rotate the trailing channels of x in interleaved pairs (2i, 2i + 1), in float32.

    Args:
        x: [..., channels]; the last 2 · angles.cos.shape[-1] of them rotate, the others pass.
        angles: broadcastable to x's leading dimensions.

    Returns:
        Same shape and dtype as x.
    """
    rope_dim = 2 * angles.cos.shape[-1]
    still, turning = x[..., :-rope_dim], x[..., -rope_dim:].float()
    even, odd = turning[..., 0::2], turning[..., 1::2]
    turned = torch.stack((even * angles.cos - odd * angles.sin, odd * angles.cos + even * angles.sin), dim=-1)
    return torch.cat((still, turned.flatten(-2).to(x.dtype)), dim=-1)
