"""The two quantised formats of official checkpoints: fp8 e4m3 in 128x128 blocks, fp4 e2m1 in runs of 32.

Both have power-of-two scales, stored as one exponent byte: byte b means 2^(b - 127), and 0xFF is NaN. Every
quantised value is a small integer times a power of two, so float32 and bfloat16 both hold it exactly.
Knows nothing of files, names or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from polytempo.device import to_device

FP8_BLOCK = 128
FP4_RUN = 32
SCALE_DTYPES = (torch.float8_e8m0fnu, torch.uint8)
_SCALE_BIAS = 127
_FP32_EXPONENT_BITS = 0x7F800000
_FP64_EXPONENT_BITS = 0x7FF0000000000000
_TINY_SCALE = -100
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class _Format:
    """A small float format.

    Attributes:
        largest_mantissa: largest value, as a fraction in [0.5, 1) ...
        largest_exponent: ... of this power of two.
        mantissa_bits: stored mantissa bits.
        min_normal_exponent: power of two of the smallest normal value.
    """

    largest_mantissa: float
    largest_exponent: int
    mantissa_bits: int
    min_normal_exponent: int


_E4M3 = _Format(largest_mantissa=0.875, largest_exponent=9, mantissa_bits=3, min_normal_exponent=-6)
_E2M1 = _Format(largest_mantissa=0.75, largest_exponent=3, mantissa_bits=1, min_normal_exponent=0)


def decode_scale(scale: Tensor) -> Tensor:
    """Turn exponent bytes into the powers of two that they mean.

    Args:
        scale: any shape, float8_e8m0fnu or uint8; the same bytes mean the same in both.

    Returns:
        float32 of the same shape; byte 0xFF becomes NaN.

    Raises:
        ValueError: another dtype, which could hold the exponent as a number.
    """
    if scale.dtype not in SCALE_DTYPES:
        raise ValueError(f"scale has dtype {scale.dtype}; expected float8_e8m0fnu or uint8 exponent bytes")
    return scale.view(torch.float8_e8m0fnu).to(torch.float32)


def dequantise_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Undo `quantise_fp8`.

    Args:
        codes: [..., R, C] float8_e4m3fn.
        scale: [..., ceil(R / 128), ceil(C / 128)] float8_e8m0fnu or uint8.
        dtype: of the result, float32 or bfloat16.

    Returns:
        [..., R, C] in `dtype`, exact unless it leaves the dtype's range.

    Raises:
        ValueError: codes or scale have another dtype or shape.
    """
    if codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"fp8 codes have dtype {codes.dtype}, expected float8_e4m3fn")
    _check_scale_shape(scale, fp8_scale_shape(codes.shape))
    values = _look_up(_fp8_values(codes.device), codes).view(codes.shape)
    blocks = _to_blocks(values, _fp8_block(codes.shape))
    return _from_blocks(blocks.mul_(_per_block(decode_scale(scale))), codes.shape).to(dtype)


def dequantise_fp4(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Undo `quantise_fp4`.

    Args:
        codes: [..., R, C / 2] int8 or uint8, two e2m1 codes per byte, the even column in the low nibble.
        scale: [..., R, C / 32] float8_e8m0fnu or uint8.
        dtype: of the result, float32 or bfloat16.

    Returns:
        [..., R, C] in `dtype`, exact unless it leaves the dtype's range.

    Raises:
        ValueError: codes or scale have another dtype or shape.
    """
    if codes.dtype not in (torch.int8, torch.uint8):
        raise ValueError(f"fp4 codes have dtype {codes.dtype}, expected int8 or uint8")
    shape = torch.Size((*codes.shape[:-1], codes.shape[-1] * 2))
    _check_scale_shape(scale, fp4_scale_shape(shape))
    runs = _look_up(_fp4_pairs(codes.device), codes).view(shape).unflatten(-1, (-1, FP4_RUN))
    return runs.mul_(decode_scale(scale).unsqueeze(-1)).flatten(-2).to(dtype)


def quantise_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to e4m3, one power-of-two scale per 128x128 block.

    A block is divided by the smallest 2^k that brings its largest magnitude to at most 448 and rounded, ties
    to even; an all-zero block has the scale 1. Where the largest magnitude was rounded down to 224 * 2^k, the
    same values are written with 2^(k - 1), so that quantising the result once more changes no byte.

    Args:
        weight: [..., R, C] float, finite.

    Returns:
        codes [..., R, C] float8_e4m3fn and scale [..., ceil(R / 128), ceil(C / 128)] float8_e8m0fnu.

    Raises:
        ValueError: the weight has fewer than two dimensions or has a value that is not finite.
    """
    values = fake_quantise_fp8(weight.to(torch.float32))
    _require_finite(values)
    scaled, scale = _encode_blocks(values, _fp8_block(values.shape), _E4M3)
    return scaled.to(torch.float8_e4m3fn), scale


def quantise_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to e2m1, one power-of-two scale per 32 neighbouring columns of a row.

    The scale follows the rule of `quantise_fp8` with 6 as the largest magnitude (and 3 as its half).

    Args:
        weight: [..., R, C] float, finite, C a multiple of 32.

    Returns:
        codes [..., R, C / 2] int8, the even column in the low nibble; scale [..., R, C / 32] float8_e8m0fnu.

    Raises:
        ValueError: the weight has fewer than two dimensions, is not finite, or C is no multiple of 32.
    """
    values = fake_quantise_fp4(weight.to(torch.float32))
    _require_finite(values)
    scaled, scale = _encode_blocks(values, (1, FP4_RUN), _E2M1)
    nibbles = _fp4_codes(scaled)
    packed = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return packed.view(torch.int8), scale


@torch.no_grad()
def fake_quantise_fp8(weight: Tensor) -> Tensor:
    """Round a weight to what an fp8 checkpoint would give back.

    Args:
        weight: [..., R, C] float32 or bfloat16.

    Returns:
        A new tensor of the same shape and dtype, equal to `dequantise_fp8(*quantise_fp8(weight))`.

    Raises:
        ValueError: the weight has fewer than two dimensions.
    """
    return _round_blocks(weight, _fp8_block(weight.shape), _E4M3)


@torch.no_grad()
def fake_quantise_fp4(weight: Tensor) -> Tensor:
    """Round a weight to what an fp4 checkpoint would give back.

    Args:
        weight: [..., R, C] float32 or bfloat16, C a multiple of 32.

    Returns:
        A new tensor of the same shape and dtype, equal to `dequantise_fp4(*quantise_fp4(weight))`.

    Raises:
        ValueError: the weight has fewer than two dimensions, or C is no multiple of 32.
    """
    fp4_scale_shape(weight.shape)
    return _round_blocks(weight, (1, FP4_RUN), _E2M1)


def fp8_scale_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scale that belongs to an fp8 weight of `shape` [..., R, C].

    Raises:
        ValueError: `shape` has fewer than two dimensions.
    """
    if len(shape) < 2:
        raise ValueError(f"a weight of shape {tuple(shape)} cannot be quantised; it needs 2 dimensions")
    return (*shape[:-2], -(-shape[-2] // FP8_BLOCK), -(-shape[-1] // FP8_BLOCK))


def fp4_scale_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scale that belongs to an fp4 weight of unpacked `shape` [..., R, C].

    Raises:
        ValueError: `shape` has fewer than two dimensions, or C is no multiple of 32.
    """
    if len(shape) < 2 or shape[-1] % FP4_RUN:
        raise ValueError(
            f"a weight of shape {tuple(shape)} cannot be quantised to fp4; it needs two dimensions or more, "
            f"the last a multiple of {FP4_RUN}"
        )
    return (*shape[:-1], shape[-1] // FP4_RUN)


def _check_scale_shape(scale: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(scale.shape) != expected:
        raise ValueError(f"scale has shape {tuple(scale.shape)}, expected {expected}")


def _require_finite(values: Tensor) -> None:
    # Checked after rounding: NaN and infinity are still there, and a value near float32's end may be new.
    if not torch.isfinite(values).all():
        raise ValueError("the weight holds a value that is not finite, or rounds to one")


def _fp8_block(shape: tuple[int, ...]) -> tuple[int, int]:
    # A weight smaller than a block is one block: no padding to 128 for small models.
    fp8_scale_shape(shape)
    return min(FP8_BLOCK, shape[-2]), min(FP8_BLOCK, shape[-1])


def _to_blocks(values: Tensor, block: tuple[int, int]) -> Tensor:
    """View [..., R, C] as [..., row blocks, rows, column blocks, columns], padded with zeros where needed."""
    rows, columns = block
    missing = (-values.shape[-1] % columns, -values.shape[-2] % rows)
    if any(missing):
        values = F.pad(values, (0, missing[0], 0, missing[1]))
    return values.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def _from_blocks(blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Undo `_to_blocks`."""
    return blocks.flatten(-2).flatten(-3, -2)[..., : shape[-2], : shape[-1]]


def _per_block(scale: Tensor) -> Tensor:
    """Let one number per block, [..., row blocks, column blocks], broadcast over `_to_blocks`."""
    return scale.unsqueeze(-1).unsqueeze(-3)


def _amax(blocks: Tensor) -> Tensor:
    lowest, highest = blocks.amin((-3, -1), keepdim=True), blocks.amax((-3, -1), keepdim=True)
    return torch.maximum(highest, -lowest)


def _round_blocks(weight: Tensor, block: tuple[int, int], form: _Format) -> Tensor:
    """Divide by the block's scale, round to `form` with ties to even, multiply back."""
    blocks = _to_blocks(weight.detach().to(torch.float32), block)
    exponents = _scale_exponents(_amax(blocks), form)
    bits, mask = torch.int32, _FP32_EXPONENT_BITS
    if exponents.numel() and exponents.min() < _TINY_SCALE:
        # Float32's subnormals have no exponent bits of their own.
        blocks, bits, mask = blocks.double(), torch.int64, _FP64_EXPONENT_BITS
    smallest_normal = _power_of_two(exponents + form.min_normal_exponent).to(blocks.dtype)
    # The spacing of representable values: the value's own power of two, never below that of the smallest
    # normal, over 2^mantissa_bits. Powers of two only, so dividing and multiplying by it is exact.
    spacing = (blocks.view(bits) & mask).view(blocks.dtype)
    torch.maximum(spacing, smallest_normal, out=spacing)
    spacing.mul_(0.5**form.mantissa_bits)
    rounded = torch.div(blocks, spacing).round_().mul_(spacing)
    return _from_blocks(rounded, weight.shape).to(weight.dtype)


def _encode_blocks(values: Tensor, block: tuple[int, int], form: _Format) -> tuple[Tensor, Tensor]:
    """Split values that `_round_blocks` made into (values / scale [..., R, C], scale bytes per block)."""
    blocks = _to_blocks(values, block)
    exponents = _scale_exponents(_amax(blocks), form)
    scaled = _from_blocks(blocks / _power_of_two(exponents), values.shape)
    scale = (exponents + _SCALE_BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)
    return scaled, scale.squeeze(-1).squeeze(-2)


def _scale_exponents(amax: Tensor, form: _Format) -> Tensor:
    """Smallest k with amax <= largest * 2^k, int32; 0 where amax is 0."""
    mantissa, exponent = torch.frexp(amax)
    exponents = exponent - form.largest_exponent + (mantissa > form.largest_mantissa)
    return exponents.clamp_(min=-_SCALE_BIAS).masked_fill_(amax == 0, 0)


def _power_of_two(exponents: Tensor) -> Tensor:
    """2^exponent in float32, exact down to the subnormals that exp2 would not promise."""
    bits = (exponents.to(torch.int64) + 1023) << 52
    return bits.view(torch.float64).to(torch.float32)


def _fp4_codes(scaled: Tensor) -> Tensor:
    """e2m1 codes, uint8, of values that are exactly representable."""
    doubled = scaled.abs().mul_(2).to(torch.int32)
    table = torch.zeros(13, dtype=torch.uint8, device=scaled.device)
    for code, value in enumerate(_FP4_VALUES):
        table[int(2 * value)] = code
    return table[doubled] | (torch.signbit(scaled).to(torch.uint8) << 3)


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    """table[byte] for every code, flat. Three times as fast on a CPU as indexing or casting."""
    return table.index_select(0, codes.contiguous().view(torch.uint8).flatten().to(torch.int32))


def _fp8_values(device: torch.device) -> Tensor:
    """[256] float32: the value of every e4m3 code."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).to(torch.float32)


def _fp4_pairs(device: torch.device) -> Tensor:
    """[256, 2] float32: the two values of every packed byte."""
    values = to_device(_FP4_VALUES, device)
    nibbles = torch.cat((values, -values))
    packed = torch.arange(256, device=device)
    return torch.stack((nibbles[packed & 15], nibbles[packed >> 4]), dim=-1)
