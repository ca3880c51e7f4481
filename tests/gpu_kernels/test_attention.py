"""Attention in Triton: exact up to rounding, and each query a function of itself and of the keys that it sees."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from triton_support import DEVICE, randn

from polytempo import gpu
from polytempo.errors import InvariantError

BF16 = torch.bfloat16
TILES, QUERIES = 3, 5


@dataclass(frozen=True)
class Case:
    """Queries, a window that a tile shares, and entries that it shares or that each query has for itself."""

    queries: Tensor
    window: tuple[Tensor, Tensor]
    entries: tuple[Tensor, Tensor]
    sink: Tensor
    scale: float

    def attend(self, tiles=slice(None), places=slice(None)) -> Tensor:
        parts = []
        for keys, mask in (self.window, self.entries):
            own = keys[tiles, places] if keys.dim() == 4 else keys[tiles]
            parts.append((own, mask[tiles if len(mask) > 1 else slice(None), places]))
        return gpu.attend(self.queries[tiles, places], parts, self.sink, self.scale)


def case(heads: int = 3, dim: int = 20, is_own: bool = False, seed: int = 0) -> Case:
    """Every query sees other keys, some none of the first block, and the first of all sees no entry."""
    window = randn(TILES, 64, dim, seed=seed + 1, dtype=BF16)
    columns, place = torch.arange(64, device=DEVICE), torch.arange(QUERIES, device=DEVICE).view(-1, 1)
    tile = torch.arange(TILES, device=DEVICE).view(-1, 1, 1)
    newest = 30 + 9 * place + 5 * tile  # on both sides of a block's edge
    seen = (columns <= newest) & (columns > newest - 20)
    entries = randn(TILES, *((QUERIES,) if is_own else ()), 64, dim, seed=seed + 2, dtype=BF16)
    visible = columns < 8 * place + 4 * tile
    queries, sink = randn(TILES, QUERIES, heads, dim, seed=seed, dtype=BF16), randn(heads, seed=seed + 3)
    return Case(queries, (window, seen), (entries, visible), sink, dim**-0.5)


def exact(one: Case, with_size: bool = False) -> Tensor:
    """In float64; or the sum of absolute terms."""
    scores, keys = [one.sink.double().view(1, 1, -1, 1).expand(*one.queries.shape[:3], 1)], []
    for own, mask in (one.window, one.entries):
        own = own if own.dim() == 4 else own.unsqueeze(1).expand(-1, QUERIES, -1, -1)
        dots = torch.einsum("nqhd,nqcd->nqhc", one.queries.double(), own.double()) * one.scale
        scores.append(dots.masked_fill(~mask.unsqueeze(2), -torch.inf))
        keys.append(own.double())
    weights, values = torch.cat(scores, -1).softmax(-1)[..., 1:], torch.cat(keys, 2)
    return torch.einsum("nqhc,nqcd->nqhd", weights, values.abs() if with_size else values)


@pytest.mark.parametrize("is_own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("heads, dim", [(3, 20), (19, 64)])
def test_exact_up_to_rounding(heads, dim, is_own):
    one = case(heads, dim, is_own)
    found, expected = one.attend(), exact(one)
    # Weights are rounded to bfloat16 before they meet the keys; all else is float32.
    bound = (torch.finfo(BF16).eps / 2 + 1e-5) * exact(one, with_size=True) + 1e-6
    assert found.dtype == torch.float32 and ((found.double() - expected).abs() <= bound).all()
    for changed in (replace(one, sink=one.sink + 1), replace(one, scale=1.1 * one.scale)):
        assert ((changed.attend().double() - expected).abs() > bound).any(), "sink and scale must matter"


@pytest.mark.parametrize("is_own", [False, True], ids=["shared", "own"])
def test_queries_do_not_depend_on_their_tile(is_own):
    one = case(is_own=is_own)
    together = one.attend()
    assert len({tuple(row) for row in together.flatten(0, 1).flatten(1).tolist()}) == TILES * QUERIES
    for tile in range(TILES):
        for place in (0, 1, 4):
            alone = one.attend(slice(tile, tile + 1), slice(place, place + 1))
            assert torch.equal(alone[0, 0], together[tile, place])
    assert torch.equal(one.attend(slice(1, 3), slice(1, 4)), together[1:3, 1:4])


def test_own_keys_are_as_shared_ones():
    """An indexer's query that keeps all its entries must meet what a query that does not choose meets."""
    one = case()
    keys, mask = one.entries
    own = replace(one, entries=(keys.unsqueeze(1).expand(-1, QUERIES, -1, -1), mask))
    assert torch.equal(own.attend(), one.attend())


def test_blocks_that_nobody_sees_change_nothing():
    """How many blocks there are is a matter of the batch's longest row."""
    one = case()
    (keys, mask), dim = one.window, one.queries.shape[-1]
    dead = torch.full((TILES, 32, dim), torch.nan, dtype=BF16, device=DEVICE)
    unseen = torch.zeros(TILES, QUERIES, 32, dtype=torch.bool, device=DEVICE)
    wide = torch.cat((dead, keys, dead), 1), torch.cat((unseen, mask, unseen), 2)
    assert torch.equal(replace(one, window=wide).attend(), one.attend())
    first = one.attend()[:, :1]
    assert not one.entries[1][0, 0].any(), "the first query sees no entry"
    lone = gpu.attend(one.queries[:, :1], [(keys, mask[:, :1])], one.sink, one.scale)
    assert torch.equal(lone[0], first[0])


def test_one_mask_for_all_tiles():
    one = case()
    keys, mask = one.window
    shared = replace(one, window=(keys, mask[1:2]))
    repeated = replace(one, window=(keys, mask[1:2].repeat(TILES, 1, 1)))
    assert torch.equal(shared.attend(), repeated.attend())


def test_what_is_not_finite_stays_in_its_query():
    one = case()
    expected = one.attend()
    one.queries[1, 2] = torch.nan
    found = one.attend()
    assert found[1, 2].isnan().all()
    found[1, 2] = expected[1, 2]
    assert torch.equal(found, expected)


def test_a_query_that_sees_nothing_gets_zeros():
    one = case()
    none = one.window[0], torch.zeros_like(one.window[1])
    assert (gpu.attend(one.queries, [none], one.sink, one.scale) == 0).all()


@pytest.mark.parametrize("fault", ["float32", "columns", "mask", "parts"])
def test_operands_that_do_not_fit_are_refused(fault):
    one = case()
    queries, parts = one.queries, [one.window]
    keys, mask = one.window
    if fault == "float32":
        queries, parts = queries.float(), [(keys.float(), mask)]
    elif fault == "columns":
        parts = [(keys[:, :33], mask[..., :33])]
    elif fault == "mask":
        parts = [(keys, mask[:2])]
    else:
        parts = 3 * parts
    with pytest.raises(InvariantError):
        gpu.attend(queries, parts, one.sink, one.scale)
