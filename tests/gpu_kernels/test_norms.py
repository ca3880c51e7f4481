"""RMS norms in Triton: near their twins, and each row a function of itself alone."""

from __future__ import annotations

import pytest
import torch
from triton_support import DEVICE, each_dtype, randn

from polytempo import gpu
from polytempo.gpu import norms
from polytempo.model import ops

# Many rows to a tile, one row to a tile, several tiles to a row.
SIZES = [1, 5, 32, 1000, 4096, 4097, 9000]


def exact_norm(x, weight, eps):
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1 if weight is None else weight.double())


@each_dtype
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_norms_are_exact_up_to_rounding(dtype, size, is_weighted):
    x, eps = randn(4, size, seed=size, dtype=dtype) / 3, 1e-3
    weight = 1 + 0.2 * randn(size, seed=1) if is_weighted else None
    found, exact = gpu.rms_norm(x, eps, weight), exact_norm(x, weight, eps)
    # A mean of positive terms keeps its relative error, which the root halves; then one rounding to the dtype.
    bound = (size * torch.finfo(torch.float32).eps / 2 + 2 * torch.finfo(dtype).eps) * exact.abs()
    assert found.dtype == dtype and ((found.double() - exact).abs() <= bound).all()
    assert ((found.double() - exact_norm(x, weight, 0.1)).abs() > bound).any(), "eps must matter"


@each_dtype
def test_ops_use_them(dtype, monkeypatch):
    x = randn(2, 3, 40, seed=1, dtype=dtype)
    module = ops.RMSNorm(40, 1e-5, DEVICE)
    module.weight.copy_(1 + 0.2 * randn(40, seed=2))
    found = module(x), ops.unweighted_rms_norm(x, 1e-5)
    assert torch.equal(found[0], gpu.rms_norm(x, 1e-5, module.weight)) and found[0].shape == x.shape
    assert torch.equal(found[1], gpu.rms_norm(x, 1e-5))
    monkeypatch.setattr(ops, "TRITON_DEVICES", set())
    for ours, theirs in zip(found, (module(x), ops.unweighted_rms_norm(x, 1e-5)), strict=True):
        assert (ours.float() - theirs.float()).abs().max() <= 2 * torch.finfo(dtype).eps * theirs.abs().max()


@each_dtype
@pytest.mark.parametrize("size", [33, 300, 5000])
def test_rows_do_not_depend_on_their_neighbours(dtype, size):
    x, weight = randn(40, size, seed=3, dtype=dtype), randn(size, seed=4)
    together = gpu.rms_norm(x, 1e-6, weight)
    x[[7, 20]] = torch.nan
    for first, count in ((0, 1), (6, 1), (33, 1), (39, 1), (0, 2), (5, 15), (3, 16), (8, 17), (0, 40)):
        found = gpu.rms_norm(x[first : first + count], 1e-6, weight)
        kept = [i for i in range(count) if first + i not in (7, 20)]
        assert torch.equal(found[kept], together[first : first + count][kept])
    assert gpu.rms_norm(x, 1e-6)[[7, 20]].isnan().all()


def test_views_and_no_rows():
    x = randn(6, 8, 10, seed=5)
    assert torch.equal(gpu.rms_norm(x.transpose(0, 1), 1e-6), gpu.rms_norm(x.transpose(0, 1).contiguous(), 1e-6))
    assert gpu.rms_norm(x[:0], 1e-6).shape == (0, 8, 10)


def test_a_program_writes_its_own_rows_only():
    x, memory = randn(200, 5, seed=6)[:3], torch.full((1000,), 9.0, device=DEVICE)
    out = memory[100:115].view(3, 5)
    constants = {"HAS_WEIGHT": False, "BLOCK_ROWS": 32, "BLOCK": 8}
    norms.rms_norm_kernel[(1,)](x, x, out, 3, 5, 1e-6, **constants)
    assert torch.allclose(out.double(), exact_norm(x, None, 1e-6), atol=1e-5)
    assert (memory[:100] == 9).all() and (memory[115:] == 9).all()
