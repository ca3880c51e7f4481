"""A copy of a row's whole state, for rows that begin with the same tokens; any position, nothing left to recompute.

A snapshot holds what a row needs from before a boundary, to be kept for long. This is the whole slot, to be kept for
the moment in which the choices of one request part: cells that the row does not need any more come along.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polytempo.cache.pool import num_blocks
from polytempo.cache.store import PooledState, RowStore
from polytempo.device import to_device


@dataclass(frozen=True)
class SlotCopy:
    """What a slot held.

    Attributes:
        num_tokens: positions that whoever takes it may count on.
        slots: what every slot owns, in the order of `_per_slot`, each without the slot dimension.
        entries: of every compressor, in the order of `_pooled`, [blocks of num_tokens tokens, BLOCK, head_dim].
    """

    num_tokens: int
    slots: tuple[Tensor, ...]
    entries: tuple[Tensor, ...]


@torch.inference_mode()
def copy_slot(store: RowStore, slot: int, num_tokens: int) -> SlotCopy:
    """Copy a slot's state, to be gone on with after num_tokens tokens.

    Args:
        store: layout `ring`.
        slot: holds num_tokens tokens, or up to a chunk more: a rewind like that after rejected drafts.
        num_tokens: at least 1.

    Returns:
        The copy; it shares no memory with the store.
    """
    block_ids = _block_ids(store, slot, num_tokens)
    entries = tuple(state.entries[block_ids[ratio]] for ratio, state in _pooled(store))  # indexing by a tensor copies
    return SlotCopy(num_tokens, tuple(tensor[slot].clone() for tensor in _per_slot(store)), entries)


@torch.inference_mode()
def paste_slot(store: RowStore, slot: int, copy: SlotCopy) -> None:
    """Give a cleared slot a copied state.

    Args:
        store: that the copy was made of.
        slot: cleared; its blocks are reserved here.
        copy: of any slot.

    Raises:
        CapacityError: there are not enough blocks.
    """
    store.pool.reserve(slot, copy.num_tokens)
    store.fit()
    for tensor, held in zip(_per_slot(store), copy.slots, strict=True):
        tensor[slot] = held
    block_ids = _block_ids(store, slot, copy.num_tokens)
    for (ratio, state), held in zip(_pooled(store), copy.entries, strict=True):
        state.entries[block_ids[ratio]] = held


def _per_slot(store: RowStore) -> list[Tensor]:
    layers = (*store.layers, *store.mtp)
    return [store.mtp_streams, *(tensor for layer in layers for tensor in layer.per_slot())]


def _pooled(store: RowStore) -> list[tuple[int, PooledState]]:
    return [(layer.shape.ratio, state) for layer in (*store.layers, *store.mtp) for state in layer.pooled]


def _block_ids(store: RowStore, slot: int, num_tokens: int) -> dict[int, Tensor]:
    """By ratio, one upload each: the blocks of a slot's first tokens, in every layer."""
    # Copies: the index outlives the call only on a device, but there it must not change under the transfer.
    return {
        ratio: to_device(pool.table[slot, : num_blocks(num_tokens, ratio)].copy(), store.device)
        for ratio, pool in store.pool.ratios.items()
    }
