"""The tensors of all rows, addressed by slot and block. Holds no length: what is valid follows from positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polytempo.cache.layout import BLOCK, LayerShape, Segment, StateShape
from polytempo.cache.pool import NULL_BLOCK, EntryPool, RatioPool
from polytempo.cache.view import BatchView
from polytempo.cache.window import WindowLayout, window_layout
from polytempo.device import require_room, to_device

CACHE_LINE = 64  # bytes


def zero_pages(like: Tensor, *shape: int) -> Tensor:
    """Zeroed state whose memory the system hands out at the first write to it.

    torch writes its zeros at once: for all seats of an engine, of which most may never be taken.

    Args:
        like: gives dtype and device.
        shape: of the result.

    Returns:
        [*shape], contiguous, on the CPU from the start of a cache line on, so that vectors do not straddle two.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    num_bytes = math.prod(shape) * like.element_size()
    raw = np.zeros(num_bytes + CACHE_LINE, dtype=np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return torch.from_numpy(raw[start : start + num_bytes]).view(like.dtype).view(shape)


@dataclass
class PooledState:
    """State of one compressor: the inputs of recent spans, and the entries made of them.

    Attributes:
        kv: [slots, input_cells, width], ring by position.
        gate: [slots, input_cells, width], ring by position.
        entries: [blocks, BLOCK, head_dim]; entry e of a slot is in its block number e // BLOCK. Grows with the pool.
    """

    kv: Tensor
    gate: Tensor
    entries: Tensor

    @classmethod
    def allocate(cls, shape: LayerShape, head_dim: int, num_slots: int, like: Tensor) -> PooledState:
        """Zeroed state for entries of head_dim channels; of blocks only the null block."""
        width = shape.input_width // shape.head_dim * head_dim
        return cls(
            zero_pages(like, num_slots, shape.input_cells, width),
            zero_pages(like, num_slots, shape.input_cells, width),
            zero_pages(like, NULL_BLOCK + 1, BLOCK, head_dim),
        )

    def fit(self, pool: RatioPool, fresh: Tensor | None) -> None:
        """Take the pool's size, and zero the blocks that it handed out: what their last owner left may be NaN.

        Args:
            pool: of this ratio.
            fresh: [N] int64, `pool.fresh` on the state's device; None if there are none.
        """
        missing = pool.size - self.entries.shape[0]
        if missing < 0:
            self.entries = self.entries[: pool.size].clone()
        if missing > 0:
            self.entries = torch.cat((self.entries, self.entries.new_zeros(missing, *self.entries.shape[1:])))
        if fresh is not None:
            self.entries[fresh] = 0.0


@dataclass(frozen=True, eq=False)
class LayerState:
    """State of one layer.

    Attributes:
        shape: its sizes.
        window: [slots, window_cells, head_dim], raw keys in the cells that the store's window layout says.
        compressed: of layers with a compressor.
        index: of layers with an indexer.
    """

    shape: LayerShape
    window: Tensor
    compressed: PooledState | None
    index: PooledState | None

    @classmethod
    def allocate(cls, shape: LayerShape, num_slots: int, like: Tensor) -> LayerState:
        """Zeroed state in the dtype and on the device of `like`."""
        window = zero_pages(like, num_slots, shape.window_cells, shape.head_dim)
        widths = (shape.head_dim if shape.ratio else 0, shape.index_head_dim)
        pooled = (PooledState.allocate(shape, width, num_slots, like) if width else None for width in widths)
        return cls(shape, window, *pooled)

    @property
    def pooled(self) -> tuple[PooledState, ...]:
        """Compressor and indexer state, those that the layer has."""
        return tuple(state for state in (self.compressed, self.index) if state is not None)

    def per_slot(self) -> tuple[Tensor, ...]:
        """What every slot owns, slot first: raw keys and compressor inputs."""
        return (self.window, *(tensor for state in self.pooled for tensor in (state.kv, state.gate)))


@dataclass(frozen=True)
class RowStore:
    """Every tensor of every row: one LayerState per decoder layer and per MTP block.

    Attributes:
        layers: of the decoder layers.
        mtp: of the MTP blocks.
        target_windows: layout of the layers' raw keys.
        mtp_windows: layout of the MTP blocks' raw keys.
        mtp_streams: [slots, window, hc, D], ring by position: streams of rows that do not draft, of which the MTP
            block's keys are made when they do; empty without an MTP block.
        pool: who holds which block of entries.
        device: where the state lives.
    """

    layers: tuple[LayerState, ...]
    mtp: tuple[LayerState, ...]
    target_windows: WindowLayout
    mtp_windows: WindowLayout
    mtp_streams: Tensor
    pool: EntryPool
    device: torch.device

    @classmethod
    def allocate(
        cls,
        shape: StateShape,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        memory: int | None = None,
    ) -> RowStore:
        """Allocate zeroed state; entries get blocks as rows grow.

        Args:
            shape: sizes per slot.
            num_slots: seats.
            dtype: of keys, compressor inputs and entries.
            device: where they live.
            memory: most bytes of all state together, None for no bound.

        Returns:
            The store.

        Raises:
            ConfigError: so little memory does not hold one row of max_model_len, or the device cannot hold the rings.
        """
        like = torch.empty(0, dtype=dtype, device=device)
        # Off the CPU they are written here, for all seats at once.
        rings = num_slots * shape.slot_bytes(dtype.itemsize)
        require_room(like.device, rings, f"rings of state of {num_slots} rows", "lower max_rows or max_chunk")
        pool = EntryPool(shape, num_slots, dtype.itemsize, memory)
        return cls(
            tuple(LayerState.allocate(layer, num_slots, like) for layer in shape.layers),
            tuple(LayerState.allocate(layer, num_slots, like) for layer in shape.mtp),
            window_layout(shape, num_slots),
            window_layout(shape, num_slots),
            zero_pages(like, num_slots, shape.window if shape.mtp else 0, *shape.streams),
            pool,
            like.device,
        )

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        slots = sum(tensor.nbytes for layer in (*self.layers, *self.mtp) for tensor in layer.per_slot())
        entries = sum(state.entries.nbytes for layer in self.layers for state in layer.pooled)
        return slots + self.mtp_streams.nbytes + entries

    def clear(self, slot: int) -> None:
        """Zero a slot and take back its blocks.

        Masked cells take no weight, but 0 · NaN is NaN: a failed row must not outlive its seat.
        """
        for layer in (*self.layers, *self.mtp):
            for tensor in layer.per_slot():
                tensor[slot].zero_()
        self.pool.release(slot)
        self.target_windows.clear(slot)
        self.mtp_windows.clear(slot)

    def target_view(self, segments: Sequence[Segment], ratios: Sequence[int]) -> BatchView:
        """Make room for a target forward over these segments, and lay it out; `ratios` as of `BatchView.build`.

        Raises:
            CapacityError: there are not enough blocks; the scheduler reserves them before, and sets rows back.
        """
        self.target_windows.make_room(segments, [layer.window for layer in self.layers])
        for segment in segments:
            self.pool.reserve(segment.slot, segment.end)
        if any(pool.fresh for pool in self.pool.ratios.values()):
            self.fit()
        tables = {ratio: pool.table for ratio, pool in self.pool.ratios.items()}
        return BatchView.build(segments, self.target_windows, ratios, self.device, tables)

    def shrink(self) -> None:
        """Give the entries' memory back, if no row holds any."""
        self.pool.shrink()
        self.fit()

    def fit(self) -> None:
        """Bring every tensor of entries to the pool's size, and zero blocks that were handed out since."""
        pools = self.pool.ratios
        fresh = {ratio: to_device(pool.fresh, self.device) for ratio, pool in pools.items() if pool.fresh}
        for layer in self.layers:
            for state in layer.pooled:
                state.fit(pools[layer.shape.ratio], fresh.get(layer.shape.ratio))
        for pool in pools.values():
            pool.fresh.clear()

    def mtp_view(self, segments: Sequence[Segment]) -> BatchView:
        """The same for a forward of the MTP block, which has no entries."""
        self.mtp_windows.make_room(segments, [layer.window for layer in self.mtp])
        return BatchView.build(segments, self.mtp_windows, (), self.device)
