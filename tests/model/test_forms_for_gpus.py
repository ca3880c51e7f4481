"""Torch forms that are taken off the CPU, where torch's own depend on how many rows there are."""

from __future__ import annotations

import pytest
import torch

from polytempo.model.ops import prefix_sum, prefix_sum_by_halves, top_ids, top_ids_by_sort

pytestmark = pytest.mark.twin


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("width", [1, 2, 3, 8, 13, 100])
def test_prefix_sums_by_halves(width):
    x = numbers(5, width, seed=width)
    found = prefix_sum_by_halves(x)
    assert found.shape == x.shape
    torch.testing.assert_close(found, prefix_sum(x), rtol=1e-13, atol=1e-13)
    whole = torch.arange(1.0, width + 1, dtype=torch.float64).unsqueeze(0)
    assert torch.equal(prefix_sum_by_halves(whole), prefix_sum(whole)), "whole numbers are exact"


@pytest.mark.parametrize("form", [prefix_sum, prefix_sum_by_halves])
def test_a_prefix_sum_depends_on_its_terms_alone(form):
    """How wide the ranking is depends on other rows' top_k; top_p must not."""
    x, terms = numbers(7, 37, seed=1), 11
    x[:, terms:] = 0
    alone = form(x[2:3, :terms])[0]
    for width in range(terms, 38):
        found = form(x[:, :width])[2]
        assert torch.equal(found[:terms], alone)
        assert (found[terms:] == alone[-1]).all(), width
    assert len(set(form(x)[2, :terms].tolist())) == terms


def test_top_ids_take_the_lowest_of_equal_scores():
    scores = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0], [0.0, -1.0, 5.0, 4.0, 6.0, -2.0]])
    assert top_ids_by_sort(scores, 4).tolist() == [[1, 3, 2, 4], [4, 2, 3, 0]]
    different = torch.randn(9, 64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(top_ids_by_sort(different, 6), top_ids(different, 6))
