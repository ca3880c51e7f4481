"""Copies of a row's state at fixed boundaries, from which another row with the same tokens can start.

At a boundary P, a multiple of SPAN, no span of any ratio is open. What a row needs from before P is then: the raw keys
of the last window, the compressor inputs of the last ratio-4 span (the next entry overlaps it), all entries, and the
target's streams of position P − 1, from which the MTP block's key of that position is made once the next token is
known. Entries are kept once per span, so that boundaries of one prompt share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polytempo.cache.layout import BLOCK, OVERLAP_RATIO
from polytempo.cache.store import LayerState, RowStore
from polytempo.device import upload

SPAN = 128
"""Tokens between boundaries: the largest ratio, so that no entry is unfinished at one."""
EntryPlaces = tuple[Tensor, Tensor]
"""Blocks of some entries, and their columns in these; layers of one ratio share a row's blocks."""


@dataclass(frozen=True)
class LayerSnapshot:
    """One layer at a boundary P.

    Attributes:
        window: [min(window − 1, P), head_dim], raw keys of the positions up to P − 1.
        inputs: per compressor with overlap, its kv and gate of the last span, [ratio, width] each.
        entries: per compressor, those of the span before P, [SPAN / ratio, width].
    """

    window: Tensor
    inputs: tuple[Tensor, ...]
    entries: tuple[Tensor, ...]


@dataclass(frozen=True)
class Snapshot:
    """A row at boundary P, entries before P − SPAN apart.

    Attributes:
        layers: decoder layers, then MTP blocks.
        streams: [1, hc, D], the target's last-layer streams of position P − 1.
    """

    layers: tuple[LayerSnapshot, ...]
    streams: Tensor

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        parts = (tensor for layer in self.layers for tensor in (layer.window, *layer.inputs, *layer.entries))
        return self.streams.nbytes + sum(tensor.nbytes for tensor in parts)


@torch.inference_mode()
def take_snapshot(store: RowStore, slot: int, boundary: int, streams: Tensor) -> Snapshot:
    """Copy a slot's state at a boundary.

    Args:
        store: layout `ring`; the slot holds at least `boundary` tokens and at most a chunk more, so that nothing that
            is copied was overwritten.
        slot: whose state.
        boundary: a multiple of SPAN, at least SPAN.
        streams: [hc, D], the target's of position boundary − 1.

    Returns:
        The snapshot; it shares no memory with the store.
    """
    places = _entry_places(store, slot, boundary - SPAN, boundary)
    layers = [_layer_snapshot(store, layer, slot, boundary, places) for layer in (*store.layers, *store.mtp)]
    return Snapshot(tuple(layers), streams[None].clone())


def _layer_snapshot(
    store: RowStore, layer: LayerState, slot: int, boundary: int, places: Mapping[int, EntryPlaces]
) -> LayerSnapshot:
    oldest = max(0, boundary - store.target_windows.window + 1)
    window = layer.window[slot, _ring_cells(oldest, boundary, layer.window)]
    inputs: list[Tensor] = []
    entries = []
    ratio = layer.shape.ratio
    for state in layer.pooled:
        if ratio == OVERLAP_RATIO:
            cells = _ring_cells(boundary - ratio, boundary, state.kv)
            inputs += [state.kv[slot, cells], state.gate[slot, cells]]
        entries.append(state.entries[places[ratio]])
    return LayerSnapshot(window, tuple(inputs), tuple(entries))


@torch.inference_mode()
def restore_snapshot(store: RowStore, slot: int, chain: Sequence[Snapshot]) -> None:
    """Give a cleared slot the state at the boundary of the chain's last snapshot.

    Args:
        store: layout `ring`.
        slot: cleared; its blocks are reserved here.
        chain: snapshots at SPAN, 2 · SPAN, … of one prompt.

    Raises:
        CapacityError: there are not enough blocks.
    """
    boundary = len(chain) * SPAN
    store.pool.reserve(slot, boundary)
    store.fit()
    places = _entry_places(store, slot, 0, boundary)
    for layer_idx, layer in enumerate((*store.layers, *store.mtp)):
        last = chain[-1].layers[layer_idx]
        layer.window[slot, _ring_cells(boundary - last.window.shape[0], boundary, layer.window)] = last.window
        ratio = layer.shape.ratio
        for number, state in enumerate(layer.pooled):
            if ratio == OVERLAP_RATIO:
                cells = _ring_cells(boundary - ratio, boundary, state.kv)
                state.kv[slot, cells], state.gate[slot, cells] = last.inputs[2 * number : 2 * number + 2]
            entries = torch.cat([snapshot.layers[layer_idx].entries[number] for snapshot in chain])
            state.entries[places[ratio]] = entries


def _ring_cells(start: int, end: int, ring: Tensor) -> Tensor:
    return torch.arange(start, end, device=ring.device) % ring.shape[1]


def _entry_places(store: RowStore, slot: int, start: int, end: int) -> dict[int, EntryPlaces]:
    """By ratio, one upload each: where a slot's entries of positions start … end − 1 lie in every layer."""
    places = {}
    for ratio, pool in store.pool.ratios.items():
        entry_ids = np.arange(start // ratio, end // ratio)
        places[ratio] = tuple(upload([pool.table[slot][entry_ids // BLOCK], entry_ids % BLOCK], store.device))
    return places
