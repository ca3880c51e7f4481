"""Products by packed matrices: the bits of the same products by the matrices that checkpoint.quant reads from them."""

from __future__ import annotations

import pytest
import torch
from kernel_support import DTYPES

from polytempo.checkpoint.quant import dequantise_fp4, dequantise_fp8
from polytempo.kernels import ops
from polytempo.kernels.build import load
from polytempo.kernels.structs import FP4, FP8, Matrix

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
FP4_SHAPES = [(32, 1), (64, 37), (512, 70), (2048, 9)]
FP8_SHAPES = [(1, 3), (33, 9), (100, 37), (129, 257), (300, 130), (2048, 9)]
"""(K, N): under, at and over a block of scales in both directions, over the panel of a task, and ends of K under and
over half of the 64 columns that are decoded at once."""


@pytest.fixture(scope="module")
def library():
    return load()


def packed(kind: int, depth: int, width: int, seed: int = 0):
    """Random codes and scales: every scale is its own power of two, from 2^-20 to 2^19."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (width, depth if kind == FP8 else depth // 2), generator=generator).to(torch.uint8)
    shape = (-(-width // 128), -(-depth // 128)) if kind == FP8 else (width, depth // 32)
    scales = torch.randint(107, 147, shape, generator=generator).to(torch.uint8)
    if kind == FP8:
        codes[(codes & 0x7F) == 0x7F] = 0x35  # NaN
    return codes, scales


def read(kind: int, codes, scales, dtype):
    """The values, by the reader of checkpoints."""
    if kind == FP8:
        return dequantise_fp8(codes.view(torch.float8_e4m3fn), scales, dtype).contiguous()
    return dequantise_fp4(codes, scales, dtype)


def by_packed(library, x, kind, codes, scales):
    return ops.linear_by(library, x, Matrix(codes.data_ptr(), scales.data_ptr(), kind), len(codes))


@each_dtype
@pytest.mark.parametrize(
    ("kind", "depth", "width"), [(FP4, *shape) for shape in FP4_SHAPES] + [(FP8, *shape) for shape in FP8_SHAPES]
)
def test_products_have_the_bits_of_expanded_weights(library, dtype, kind, depth, width):
    codes, scales = packed(kind, depth, width)
    weight = read(kind, codes, scales, dtype)
    assert scales.numel() == 1 or len(scales.unique()) > 1
    for rows in (*range(10), 17, 64, 70, 128):  # the fewest are read in place, others from a panel
        x = torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows)).to(dtype)
        assert torch.equal(by_packed(library, x, kind, codes, scales), ops.linear(library, x, weight)), rows


@each_dtype
@pytest.mark.parametrize("kind", [FP4, FP8])
@pytest.mark.parametrize("scale", [*range(0, 30), 100, 127, 150, *range(230, 254)])
def test_every_code_at_every_scale_is_what_the_reader_says(library, dtype, kind, scale):
    # x picks one column at a time, so that the product is the weight itself.
    every = torch.arange(256, dtype=torch.uint8)
    codes = every[(every & 0x7F) != 0x7F] if kind == FP8 else every
    depth = 256 if kind == FP8 else 512
    codes = torch.cat((codes, codes[: 256 - len(codes)])).unsqueeze(0)
    scales = torch.full((1, depth // (128 if kind == FP8 else 32)), scale, dtype=torch.uint8)
    weight = read(kind, codes, scales, dtype)
    eye = torch.eye(depth, dtype=dtype)
    picked = by_packed(library, eye, kind, codes, scales).flatten()
    # Read in place at up to four rows, by one expanded panel at more.
    in_place = torch.cat([by_packed(library, rows, kind, codes, scales).flatten() for rows in eye.split(4)])
    expected = ops.linear(library, torch.eye(depth, dtype=dtype), weight).flatten()
    finite = weight.isfinite().all()  # at the highest scales single codes are not, and loading refuses those
    assert finite or scale > 240
    if finite:
        assert torch.equal(picked, expected) and torch.equal(in_place, expected)
        if dtype == torch.float32 or scale > 30:  # the bfloat16 dot product reads subnormals as zero
            assert torch.equal(expected, weight.flatten())


@each_dtype
@pytest.mark.parametrize("kind", [FP4, FP8])
def test_threads_change_no_bit(library, dtype, kind):
    codes, scales = packed(kind, 512, 200)
    x = torch.randn(70, 512).to(dtype)
    matrix = Matrix(codes.data_ptr(), scales.data_ptr(), kind)
    assert torch.equal(*(ops.linear_by(library, x, matrix, 200, threads) for threads in (1, 2)))
