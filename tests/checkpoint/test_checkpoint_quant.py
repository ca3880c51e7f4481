"""The fp8 and fp4 formats against slow twins that know only the formats' value lists."""

from __future__ import annotations

import math

import pytest
import torch
from checkpoint_helpers import bits
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polytempo.checkpoint.quant import (
    decode_scale,
    dequantise_fp4,
    dequantise_fp8,
    fake_quantise_fp4,
    fake_quantise_fp8,
    fp4_scale_shape,
    fp8_scale_shape,
    quantise_fp4,
    quantise_fp8,
)

SCALE_BYTES = (0x78, 0x7F, 0x86, 0x00, 0xFE)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)]
E4M3 = E4M3[:-1]  # the last code is NaN
FORMATS = {
    "fp4": (E2M1, fake_quantise_fp4, quantise_fp4, dequantise_fp4),
    "fp8": (E4M3, fake_quantise_fp8, quantise_fp8, dequantise_fp8),
}


def nearest(value: float, grid: list[float]) -> float:
    """Round a magnitude to the grid, ties to the even code."""
    code = min(range(len(grid)), key=lambda c: (abs(grid[c] - abs(value)), c % 2))
    return math.copysign(grid[code], value)


def slow_block(values: list[float], grid: list[float]) -> list[float]:
    """Smallest power of two that fits the largest magnitude, then round each value."""
    largest = max(map(abs, values))
    if largest == 0:
        return values
    exponent = -127
    while largest > grid[-1] * 2.0**exponent:
        exponent += 1
    return [nearest(value / 2.0**exponent, grid) * 2.0**exponent for value in values]


@pytest.mark.parametrize("as_uint8", [False, True])
@pytest.mark.parametrize("byte", SCALE_BYTES)
def test_scale_byte_is_an_exponent_not_a_number(byte, as_uint8):
    # Field case 50: the exponent byte copied as a number gives fluent garbage.
    scale = torch.tensor([[byte]], dtype=torch.uint8)
    scale = scale if as_uint8 else scale.view(torch.float8_e8m0fnu)
    power = 2.0 ** (byte - 127)
    # At 0xFE only values below 2 stay within float32.
    values = torch.tensor([[0.5, 1.0, -1.5, 0.0]])
    expected = [[0.5 * power, power, -1.5 * power, 0.0]]
    codes = values.to(torch.float8_e4m3fn)
    for dtype in (torch.float32, torch.bfloat16):
        assert dequantise_fp8(codes, scale, dtype).double().tolist() == expected
    # Codes 1, 2, 11, 0: the even column is the low nibble.
    packed = torch.zeros(1, 16, dtype=torch.int8)
    packed[0, 0], packed[0, 1] = 0x21, 0x0B
    for dtype in (torch.float32, torch.bfloat16):
        assert dequantise_fp4(packed, scale, dtype).double()[:, :4].tolist() == expected


def test_decode_scale_all_bytes():
    every = torch.arange(256, dtype=torch.uint8)
    decoded = decode_scale(every).double().tolist()
    assert decoded[:255] == [2.0 ** (byte - 127) for byte in range(255)]
    assert math.isnan(decoded[255])
    assert decode_scale(every.view(torch.float8_e8m0fnu)).double().tolist()[:255] == decoded[:255]


def test_every_code_dequantises_to_its_value():
    codes = torch.arange(127, dtype=torch.uint8).view(1, -1)
    one = torch.full((1, 1), 127, dtype=torch.uint8)
    assert dequantise_fp8(codes.view(torch.float8_e4m3fn), one)[0].tolist() == E4M3
    packed = torch.tensor([[low | low + 1 << 4 for low in range(0, 16, 2)] * 2], dtype=torch.uint8)
    signed = E2M1 + [-value for value in E2M1]
    assert dequantise_fp4(packed, one)[0].tolist() == signed * 2


@pytest.mark.parametrize("name", FORMATS)
def test_fake_quantise_equals_slow_twin(name):
    grid, fake, quantise, dequantise = FORMATS[name]
    generator = torch.Generator().manual_seed(1)
    for magnitude in (1e-3, 1.0, 37.0):
        weight = torch.randn(24, 32, generator=generator) * magnitude
        # Ties in plenty: values half-way between two neighbours of the grid.
        weight[:8] = torch.tensor(grid)[torch.randint(len(grid) - 1, (8, 32), generator=generator)] * 1.5
        rows = weight.tolist()
        blocks = [row for row in rows] if name == "fp4" else [[value for row in rows for value in row]]
        expected = torch.tensor([slow_block(block, grid) for block in blocks]).view_as(weight)
        assert torch.equal(fake(weight), expected)
        assert torch.equal(dequantise(*quantise(weight)), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_scale_is_the_smallest_that_fits(name):
    grid, _, quantise, dequantise = FORMATS[name]
    largest = grid[-1]
    # A block's largest magnitude, and the exponent that it must be written with.
    for value, exponent in (
        (largest, 0),
        (largest * 1.2, 1),
        (largest / 2, -1),
        (largest * 2.0**-40, -40),
        # Rounded at exponent 1, down to the largest itself, which is then written at exponent 0.
        (largest * 1.001, 0),
        # Rounded at exponent 1 to 480, which e4m3 lacks; fp4 rounds 6.3 down to 6.
        (largest * 1.05, 1 if name == "fp8" else 0),
    ):
        weight = torch.zeros(1, 32)
        weight[0, 5] = value
        codes, scale = quantise(weight)
        assert int(scale.view(torch.uint8)) - 127 == exponent
        assert dequantise(codes, scale)[0, 5] == slow_block([value], grid)[0]
    assert quantise(torch.zeros(1, 32))[1].view(torch.uint8).item() == 127


@settings(max_examples=60, deadline=None)
@example(name="fp8", rows=1, runs=1, magnitude=-124, seed=0)  # values below float32's normals
@given(
    name=st.sampled_from(sorted(FORMATS)),
    rows=st.integers(1, 140),
    runs=st.integers(1, 5),
    magnitude=st.integers(-150, 110),
    seed=st.integers(0, 2**31),
)
def test_quantise_dequantise_is_bit_stable(name, rows, runs, magnitude, seed):
    _, fake, quantise, dequantise = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 32 * runs, generator=generator)
    weight *= torch.exp2(torch.randint(-12, 12, weight.shape, generator=generator).float())
    weight = (weight.double() * 2.0**magnitude).float()
    codes, scale = quantise(weight)
    values = dequantise(codes, scale)
    assert torch.equal(bits(values), bits(fake(weight)))
    assert torch.equal(bits(fake(values)), bits(values))
    codes_again, scale_again = quantise(values)
    assert torch.equal(bits(codes), bits(codes_again)) and torch.equal(bits(scale), bits(scale_again))


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(FORMATS)), seed=st.integers(0, 2**31), low=st.integers(1, 220))
def test_any_file_keeps_its_values(name, seed, low):
    # Codes and scales that another writer chose, not the smallest scale among them.
    _, _, quantise, dequantise = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (130, 96), generator=generator, dtype=torch.uint8)
    if name == "fp8":
        codes = torch.where((codes & 127) == 127, 0, codes).view(torch.float8_e4m3fn)
    shape = (2, 1) if name == "fp8" else (130, 6)
    scale = torch.randint(low, low + 20, shape, generator=generator, dtype=torch.uint8)
    values = dequantise(codes, scale)
    assert torch.equal(bits(dequantise(*quantise(values))), bits(values))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(3, 2, 40, 64), (130, 160), (128, 256), (1, 32), (300, 32)])
def test_leading_dims_and_ragged_blocks(name, shape):
    _, fake, quantise, dequantise = FORMATS[name]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    values = fake(weight)
    assert values.shape == weight.shape
    codes, scale = quantise(weight)
    assert tuple(scale.shape) == (fp8_scale_shape if name == "fp8" else fp4_scale_shape)(weight.shape)
    assert torch.equal(dequantise(codes, scale), values)
    # A block does not know its neighbours: the far corner alone gives the same values.
    rows = (shape[-2] - 1) // 128 * 128 if name == "fp8" else shape[-2] - 1
    columns = (shape[-1] - 1) // 128 * 128 if name == "fp8" else shape[-1] - 32
    assert torch.equal(fake(weight[..., rows:, columns:]), values[..., rows:, columns:])
    narrow = fake(weight.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow.float(), fake(weight.bfloat16().float()))


def test_fake_quantise_leaves_its_input_alone():
    weight = torch.randn(32, 32).requires_grad_()
    before = weight.detach().clone()
    assert not fake_quantise_fp4(weight).requires_grad
    fake_quantise_fp8(weight)
    assert torch.equal(weight.detach(), before)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.4e38])
def test_not_finite_is_refused(name, bad):
    # 3.4e38 is finite, but rounds up to a value that float32 cannot hold.
    weight = torch.zeros(2, 32)
    weight[1, 3] = bad
    with pytest.raises(ValueError, match="not finite"):
        FORMATS[name][2](weight)


def test_wrong_dtype_or_shape_is_refused():
    codes, scale = quantise_fp8(torch.ones(130, 160))
    with pytest.raises(ValueError, match="torch.int32"):
        dequantise_fp8(codes, scale.view(torch.uint8).int())
    with pytest.raises(ValueError, match="torch.float32"):
        dequantise_fp8(codes, decode_scale(scale))
    with pytest.raises(ValueError, match=r"\(2, 1\).*\(2, 2\)"):
        dequantise_fp8(codes, scale[:, :1])
    with pytest.raises(ValueError, match="torch.float32"):
        dequantise_fp8(codes.float(), scale)
    packed, run_scale = quantise_fp4(torch.ones(4, 64))
    with pytest.raises(ValueError, match=r"\(4, 1\).*\(4, 2\)"):
        dequantise_fp4(packed, run_scale[:, :1])
    with pytest.raises(ValueError, match="torch.int32"):
        dequantise_fp4(packed.int(), run_scale)
    with pytest.raises(ValueError, match="multiple of 32"):
        fake_quantise_fp4(torch.ones(4, 40))
    with pytest.raises(ValueError, match="2 dimensions"):
        fake_quantise_fp8(torch.ones(4))
