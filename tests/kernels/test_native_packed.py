"""Products by packed matrices: the bits of the same products by the matrices that checkpoint.quant reads from them."""

from __future__ import annotations

import platform

import pytest
import torch
from kernel_support import DTYPES

from polytempo.checkpoint.quant import dequantise_fp4, dequantise_fp8
from polytempo.kernels import build, ops
from polytempo.kernels.structs import FP4, FP8, Matrix

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
FP4_SHAPES = [(32, 1), (64, 37), (512, 70), (2048, 9)]
FP8_SHAPES = [(1, 3), (33, 9), (100, 37), (129, 257), (300, 130), (2048, 9)]
"""(K, N): under, at and over a block of scales in both directions, over the panel of a task, and ends of K under and
over half of the 64 columns that are decoded at once."""


BUILDS = {
    "native": (),
    "avx512bw": ("-O1", "-mno-avx512vbmi", "-mno-avx512bf16"),
    "avx2": ("-O1", "-march=x86-64-v3"),
    "bf16_dot": ("-O1", "-UPT_SLOW_BF16_DOT"),
    "bf16_as_floats": ("-O1", "-DPT_SLOW_BF16_DOT"),
}
"""Instruction sets that decode or multiply in ways of their own, by the flags that leave no more than them."""


@pytest.fixture(scope="module", params=BUILDS)
def library(request, tmp_path_factory):
    if request.param == "native":
        return build.load()
    if platform.machine() != "x86_64":
        pytest.skip("x86 instruction sets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp(request.param)))
        patch.setattr(build, "FLAGS", (*build.FLAGS, *BUILDS[request.param]))
        built = build.load()
    assert request.param != "avx2" or built.pt_instructions() == b"avx2"
    return built


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
def test_every_code_at_every_scale_is_what_the_reader_says(library, dtype, kind):
    # x picks one column at a time, so that the product is the weight itself.
    eye = torch.eye(128, dtype=dtype)
    for scale in range(255):
        codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
        scales = torch.full((1, 1) if kind == FP8 else (4, 4), scale, dtype=torch.uint8)
        if kind == FP8:
            codes[(codes & 0x7F) == 0x7F] = 0x35  # NaN
            codes[~read(kind, codes, scales, dtype).isfinite()] = 0  # loading refuses those
        else:
            codes = codes.view(4, 64)
        weight = read(kind, codes, scales, dtype)
        if not weight.isfinite().all():
            assert scale > 250
            continue
        picked = by_packed(library, eye, kind, codes, scales)
        # Read in place at up to four rows, by one expanded panel at more.
        in_place = torch.cat([by_packed(library, rows, kind, codes, scales) for rows in eye.split(4)])
        expected = ops.linear(library, eye, weight)
        assert torch.equal(picked, expected) and torch.equal(in_place, expected), scale
        if dtype == torch.float32 or scale > 30:  # the bfloat16 dot product reads subnormals as zero
            assert torch.equal(expected, weight.T), scale


@each_dtype
@pytest.mark.parametrize(("kind", "depths"), [(FP4, range(32, 300, 32)), (FP8, range(1, 131))], ids=["fp4", "fp8"])
def test_every_tail_of_a_row(library, dtype, kind, depths):
    for depth in depths:
        codes, scales = packed(kind, depth, 10)
        weight = read(kind, codes, scales, dtype)
        x = torch.randn(9, depth, generator=torch.Generator().manual_seed(depth)).to(dtype)
        expected = ops.linear(library, x, weight)
        assert torch.equal(by_packed(library, x, kind, codes, scales), expected), depth
        first = x[:1].contiguous()
        assert torch.equal(ops.linear(library, first, weight), expected[:1]), depth
        assert torch.equal(by_packed(library, first, kind, codes, scales), expected[:1]), depth


@each_dtype
@pytest.mark.parametrize("kind", [FP4, FP8])
def test_threads_change_no_bit(library, dtype, kind):
    codes, scales = packed(kind, 512, 200)
    x = torch.randn(70, 512).to(dtype)
    matrix = Matrix(codes.data_ptr(), scales.data_ptr(), kind)
    assert torch.equal(*(ops.linear_by(library, x, matrix, 200, threads) for threads in (1, 2)))
