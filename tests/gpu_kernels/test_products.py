"""Products in Triton: as exact as their twins, and each row a function of itself alone."""

from __future__ import annotations

import pytest
import torch
from triton_support import DEVICE, close_to_exact, each_dtype, randn

from polytempo import gpu
from polytempo.errors import InvariantError
from polytempo.gpu import grid, products
from polytempo.model import ops

# Below, at and above a tile in every dimension, and K in several blocks with a tail.
SHAPES = [(1, 1, 1), (3, 33, 5), (16, 128, 32), (17, 200, 33), (40, 300, 70)]


@each_dtype
@pytest.mark.parametrize("rows, depth, width", SHAPES)
def test_linear_is_exact_up_to_rounding(dtype, rows, depth, width):
    x, weight = randn(rows, depth, seed=1, dtype=dtype), randn(width, depth, seed=2, dtype=dtype)
    found, exact = gpu.linear(x, weight), x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t()
    assert found.dtype == dtype and close_to_exact(found, exact, size, depth)
    assert not close_to_exact(found.roll(1, 0) if rows > 1 else found + 1, exact, size, depth), "the bound says nothing"


@each_dtype
def test_matmul_with_any_strides(dtype):
    a, b = randn(19, 3, 70, seed=1, dtype=dtype).transpose(0, 1), randn(3, 37, 70, seed=2, dtype=dtype).transpose(1, 2)
    b = torch.stack((b, b), dim=3)[..., 0]
    assert not a.is_contiguous() and not b.is_contiguous() and 1 not in b.stride()
    found, exact = gpu.matmul(a, b), a.double() @ b.double()
    assert close_to_exact(found, exact, a.double().abs() @ b.double().abs(), 70)
    assert torch.equal(found, gpu.matmul(a.contiguous(), b.contiguous()))


def windows(total: int) -> list[tuple[int, int]]:
    """(first, count): a row alone, and among others at different places, also across a tile's edge."""
    return [(0, 1), (1, 1), (7, 1), (16, 1), (total - 1, 1), (0, 2), (15, 2), (0, 15), (3, 16), (8, 17)]


@each_dtype
@pytest.mark.parametrize("depth, width", [(5, 3), (130, 33), (300, 70)])
def test_rows_do_not_depend_on_their_neighbours(dtype, depth, width):
    x, weight = randn(40, depth, seed=3, dtype=dtype), randn(width, depth, seed=4, dtype=dtype)
    together = gpu.linear(x, weight)
    assert len({tuple(row) for row in together.tolist()}) == 40, "rows must differ"
    for first, count in windows(40):
        part = slice(first, first + count)
        assert torch.equal(gpu.linear(x[part], weight), together[part]), (first, count)
    by_batch = gpu.matmul(x.view(4, 10, depth), weight.t().expand(4, -1, -1))
    assert torch.equal(by_batch.view(40, width), together), "nor on the number of batches"


@each_dtype
def test_what_is_not_finite_stays_in_its_row(dtype):
    x, weight = randn(20, 33, seed=5, dtype=dtype), randn(9, 33, seed=6, dtype=dtype)
    expected = gpu.linear(x, weight)
    x[[2, 17]] = torch.nan
    x[5] = torch.inf
    found, others = gpu.linear(x, weight), [i for i in range(20) if i not in (2, 5, 17)]
    assert torch.equal(found[others], expected[others])
    assert found[[2, 17]].isnan().all() and not found[5].isfinite().any()


@each_dtype
def test_nothing_beyond_the_operands_is_read_or_written(dtype):
    # Operands inside larger tensors of NaN; the output is compared with one that stands alone.
    x, weight = randn(5, 33, seed=7, dtype=dtype), randn(7, 33, seed=8, dtype=dtype)
    wide_x, wide_weight = (torch.full((64, 192), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    wide_x[:5, :33], wide_weight[:7, :33] = x, weight
    assert torch.equal(gpu.linear(wide_x[:5, :33], wide_weight[:7, :33]), gpu.linear(x, weight))


def test_a_program_writes_its_own_tile_only():
    # All in larger memory: a kernel that goes beyond fails this test, and does not end the process.
    x, weight = randn(1000, 8, seed=7)[:5], randn(1000, 8, seed=8)[:7]
    memory = torch.full((1000,), 9.0, device=DEVICE)
    out = memory[100:135].view(1, 5, 7)
    arguments = (5, 7, 8, 0, 8, 1, 0, 8, 1)
    products.product_kernel[(1,)](x, weight, out, *arguments, **products.TILES[torch.float32])
    assert torch.allclose(out[0], x @ weight.t(), atol=1e-5)
    assert (memory[:100] == 9).all() and (memory[135:] == 9).all()


def test_empty_operands():
    assert gpu.linear(randn(0, 8), randn(5, 8)).shape == (0, 5)
    assert gpu.matmul(randn(0, 3, 8), randn(0, 8, 5)).shape == (0, 3, 5)
    assert torch.equal(gpu.linear(randn(3, 0), randn(5, 0)), torch.zeros(3, 5, device=DEVICE))


@pytest.mark.parametrize(
    "a, b, message",
    [
        (randn(2, 3), randn(4, 5), "1, 2, 3"),
        (randn(2, 3), randn(4, 3, dtype=torch.bfloat16), "bfloat16"),
        (randn(2, 3).double(), randn(4, 3).double(), "float64"),
        (randn(3), randn(4, 3), "linear got x"),
    ],
)
def test_operands_that_do_not_fit_are_refused(a, b, message):
    with pytest.raises(InvariantError, match=message):
        gpu.linear(a, b)


def test_ops_dispatch(monkeypatch):
    """On the tensor's device and dtype, without gradients, and never against the model's choice of torch."""
    x, weight = randn(3, 8), randn(5, 8)
    calls = []
    monkeypatch.setattr(grid, "launch", lambda *arguments, **constants: calls.append(arguments[0]))

    def count(call):
        calls.clear()
        call()
        return len(calls)

    assert count(lambda: ops.linear(x, weight)) == 1
    assert count(lambda: ops.matmul(x.unsqueeze(0), weight.t().unsqueeze(0))) == 1
    assert count(lambda: ops.linear(x.double(), weight.double())) == 0

    class Chosen:
        def __init__(self, kernels):
            self.kernels = kernels

        @ops.by_own_kernels
        def run(self):
            return ops.linear(x, weight)

    assert [count(Chosen(kernels).run) for kernels in ("auto", "triton", "torch")] == [1, 1, 0]
    assert count(lambda: ops.linear(x, weight)) == 1, "the choice ends with the call"
    with torch.enable_grad():
        assert count(lambda: ops.linear(x, weight)) == 0
    monkeypatch.setattr(ops, "TRITON_DEVICES", {"elsewhere"})
    assert count(lambda: ops.linear(x, weight)) == 0
