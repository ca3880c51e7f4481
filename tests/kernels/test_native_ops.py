"""Single kernels: as good as torch's against float64, and a row's result is a function of that row alone."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F
from kernel_support import DTYPES

from polytempo.engine.noise import uniform
from polytempo.engine.sampling import NO_TOKEN, greedy
from polytempo.errors import InvariantError
from polytempo.kernels import ops
from polytempo.kernels.build import load
from polytempo.kernels.structs import PLAIN, Matrix
from polytempo.model.ops import RMSNorm

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
SHAPES = [(1, 1), (3, 5), (16, 4), (31, 7), (32, 8), (33, 9), (64, 64), (100, 130), (257, 66), (2048, 37)]
"""(K, N): under, at and over every vector width; N over the panel of a task."""


@pytest.fixture(scope="module")
def library():
    return load()


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def factors(rows: int, depth: int, width: int, dtype: torch.dtype, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, depth, generator=generator).to(dtype) for n in (rows, width))
    return x, weight


@each_dtype
@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_linear_is_as_exact_as_torch(library, dtype, depth, width, threads):
    for rows in (0, 1, 2, 3, 4, 5, 7, 64, 65, 70):
        x, weight = factors(rows, depth, width, dtype)
        exact = x.double() @ weight.double().T
        ours, theirs = ops.linear(library, x, weight), F.linear(x, weight)
        assert ours.shape == (rows, width) and ours.dtype == dtype
        if rows:
            floor = (theirs.double() - exact).abs().max()
            # One rounding of the largest product more: another order may add what torch's order cancels.
            room = exact.abs().max() * (2**-23 if dtype == torch.float32 else 2**-9)
            assert (ours.double() - exact).abs().max() <= 2 * floor + room


@each_dtype
@pytest.mark.parametrize(("depth", "width"), [(33, 9), (512, 70), (2048, 20)])
def test_a_row_of_linear_does_not_depend_on_the_others(library, dtype, depth, width, threads):
    x, weight = factors(130, depth, width, dtype)
    weight[:, depth // 2 :] = -weight[:, : depth - depth // 2]  # products cancel: any other order shows
    x[:, depth // 2 :] = x[:, : depth - depth // 2]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = torch.cat([ops.linear(library, row[None], weight) for row in x])
    torch.set_num_threads(before)
    for rows in range(1, 131):
        assert torch.equal(ops.linear(library, x[:rows], weight), expected[:rows]), rows
    for first in (1, 2, 3, 64, 127):
        assert torch.equal(ops.linear(library, x[first:], weight), expected[first:]), first
    for columns in (1, 2, 5, 8):
        part = ops.linear(library, x[:7], weight[:columns].contiguous())
        assert torch.equal(part, expected[:7, :columns]), columns


@each_dtype
def test_neighbours_that_are_not_finite_stay_where_they_are(library, dtype):
    x, weight = factors(9, 70, 21, dtype)
    expected = ops.linear(library, x, weight)
    for value in (float("nan"), float("inf")):
        for place in range(9):
            poisoned = x.clone()
            poisoned[place] = value
            found = ops.linear(library, poisoned, weight)
            others = [row for row in range(9) if row != place]
            assert torch.equal(found[others], expected[others]) and found[place].isnan().any()


@each_dtype
def test_memory_around_the_operands_is_neither_read_nor_written(library, dtype):
    """Every operand begins and ends in the middle of a block of NaN, off any alignment."""
    x, weight = factors(5, 37, 11, dtype)
    expected = ops.linear(library, x, weight)
    for shift in (1, 3, 7):
        inside = []
        for tensor in (x, weight):
            block = torch.full((tensor.numel() + 100,), float("nan"), dtype=dtype)
            part = block[shift : shift + tensor.numel()].view_as(tensor)
            part.copy_(tensor)
            inside.append(part)
        assert inside[0].data_ptr() % 16
        assert torch.equal(ops.linear(library, *inside), expected)
        out = torch.full((55 + 100,), 7.0, dtype=dtype)
        target = out[shift : shift + 55]
        weight_of = ctypes.byref(Matrix(inside[1].data_ptr(), None, PLAIN))
        library.pt_linear(inside[0].data_ptr(), weight_of, target.data_ptr(), 5, 37, 11,
                          dtype == torch.bfloat16, 1)  # fmt: skip
        assert torch.equal(target.view(5, 11), expected)
        assert (out[:shift] == 7).all() and (out[shift + 55 :] == 7).all()


def test_operands_that_would_be_read_wrongly_are_refused(library):
    x, weight = factors(4, 8, 6, torch.float32)
    strided = [torch.cat((tensor, tensor), dim=1)[:, :8] for tensor in (x, weight)]
    for wrong in ((strided[0], weight), (x, strided[1]), (x.double(), weight.double()), (x, weight.bfloat16())):
        with pytest.raises(InvariantError, match="kernel operand"):
            ops.linear(library, *wrong)
    for wrong in ((x[:, :7].contiguous(), weight), (x[0], weight)):
        with pytest.raises(InvariantError, match="kernel linear got"):
            ops.linear(library, *wrong)
    for wrong in (strided[0], x.double(), x.half()):
        with pytest.raises(InvariantError, match="kernel operand"):
            ops.greedy(library, wrong)
    with pytest.raises(InvariantError, match="kernel rms_norm"):
        ops.rms_norm(library, x, torch.ones(7), 1e-6)


@each_dtype
@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 250])
def test_rms_norm(library, dtype, width):
    x = factors(33, width, 1, dtype)[0] * 5
    norm = RMSNorm(width, 1e-3)
    norm.weight.data = 1 + 0.2 * torch.randn(width, generator=torch.Generator().manual_seed(2))
    found, twin = ops.rms_norm(library, x, norm.weight.data, 1e-3), norm(x)
    exact = norm.weight.double() * x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt()
    floor = (twin.double() - exact).abs().max()
    assert (found.double() - exact).abs().max() <= 2 * floor + exact.abs().max() * 2**-23
    assert torch.equal(ops.rms_norm(library, x[5:6].contiguous(), norm.weight.data, 1e-3), found[5:6])


def test_exp(library):
    x = torch.cat((torch.linspace(-87, 88, 100_003), torch.linspace(-1, 1, 10_007), torch.zeros(1)))
    found, exact = ops.exp(library, x), x.double().exp()
    assert ((found.double() - exact).abs() / exact).max() < 2**-22
    assert found[-1] == 1.0
    edges = torch.tensor([float("-inf"), -200.0, -87.5, 90.0, float("inf"), float("nan")])
    found = ops.exp(library, edges)
    assert found[:3].tolist() == [0.0, 0.0, 0.0] and found[5].isnan()
    assert found[3] == found[4] == ops.exp(library, torch.tensor([88.0]))[0]


def test_an_element_of_exp_does_not_depend_on_its_place(library):
    x = torch.randn(200) * 8
    whole = ops.exp(library, x)
    for count in range(1, 70):
        assert torch.equal(ops.exp(library, x[3 : 3 + count].contiguous()), whole[3 : 3 + count])


@each_dtype
@pytest.mark.parametrize("width", [1, 5, 16, 17, 37, 4096])
def test_greedy_is_the_twin_s(library, threads, width, dtype):
    """Rows of many equal values, on every side of a vector; and rows without an answer."""
    generator = torch.Generator().manual_seed(width)
    x = (2 * torch.randn(90, width, generator=generator)).round().to(dtype)
    x[3, -1], x[4, 0], x[5, width // 2], x[6] = torch.nan, torch.nan, torch.inf, -torch.inf
    x[7, : width // 2], x[8], x[9] = -torch.inf, 0.0, -1.0 - torch.rand(width, generator=generator)
    x[10] = torch.tensor([-0.0, 0.0]).repeat(width)[:width]
    found = ops.greedy(library, x)
    assert found[3:7].tolist() == [NO_TOKEN] * 4 and (found[7:] != NO_TOKEN).all()
    if width > 5:
        is_highest = x == x.amax(-1, keepdim=True)
        assert (is_highest.sum(-1) > 1).any() and len(set(found.tolist())) > 3
    assert torch.equal(found, greedy(x))
    assert torch.equal(found, torch.cat([ops.greedy(library, row) for row in x.split(1)]))


@pytest.mark.parametrize("num_groups", [0, 1, 17, 1024, 5000])
def test_uniform_is_the_twin_s(library, threads, num_groups):
    """Addresses with all bits, negative seeds among them; groups under and over a vector and a task."""
    generator = torch.Generator().manual_seed(num_groups)
    seeds = torch.randint(-(2**63), 2**63 - 1, (9,), generator=generator)
    choices, positions = torch.randint(0, 2**32, (2, 9), generator=generator)
    assert (seeds < 0).any() and (choices >= 2**31).any() and (positions >= 2**31).any()
    found = ops.uniform(library, seeds, choices, positions, num_groups)
    assert torch.equal(found, uniform(seeds, choices, positions, num_groups))
    rows = zip(seeds.split(1), choices.split(1), positions.split(1), strict=True)
    assert torch.equal(found, torch.cat([ops.uniform(library, *row, num_groups) for row in rows]))


def test_uniform_refuses_what_it_would_read_wrongly(library):
    three, two = torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    square = torch.zeros(2, 2, dtype=torch.int64)
    spread = torch.zeros(6, dtype=torch.int64)[::2]
    for wrong in ((square,) * 3, (three, three, two), (three.int(), three, three), (spread, three, three)):
        with pytest.raises(InvariantError):
            ops.uniform(library, *wrong, 4)
