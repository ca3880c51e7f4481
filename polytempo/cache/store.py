"""The tensors of all rows, addressed by slot. Holds no length: what is valid follows from positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polytempo.cache.layout import LayerShape, Segment, StateShape
from polytempo.cache.view import BatchView
from polytempo.cache.window import WindowLayout, window_layout


@dataclass(frozen=True)
class PooledState:
    """State of one compressor: the inputs of recent spans, and the entries made of them.

    Attributes:
        kv: [slots, input_cells, width], ring by position.
        gate: [slots, input_cells, width], ring by position.
        entries: [slots, max_entries, head_dim], column e is entry e.
    """

    kv: Tensor
    gate: Tensor
    entries: Tensor

    @classmethod
    def allocate(cls, shape: LayerShape, head_dim: int, num_slots: int, like: Tensor) -> PooledState:
        """Zeroed state for entries of head_dim channels."""
        width = shape.input_width // shape.head_dim * head_dim
        return cls(
            like.new_zeros(num_slots, shape.input_cells, width),
            like.new_zeros(num_slots, shape.input_cells, width),
            like.new_zeros(num_slots, shape.max_entries, head_dim),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, slot first."""
        return self.kv, self.gate, self.entries


@dataclass(frozen=True)
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
        window = like.new_zeros(num_slots, shape.window_cells, shape.head_dim)
        compressed = PooledState.allocate(shape, shape.head_dim, num_slots, like) if shape.ratio else None
        index = PooledState.allocate(shape, shape.index_head_dim, num_slots, like) if shape.index_head_dim else None
        return cls(shape, window, compressed, index)

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, slot first."""
        pooled = [state.tensors() for state in (self.compressed, self.index) if state is not None]
        return (self.window, *(tensor for group in pooled for tensor in group))


@dataclass(frozen=True)
class RowStore:
    """Every tensor of every row: one LayerState per decoder layer and per MTP block.

    Attributes:
        layers: of the decoder layers.
        mtp: of the MTP blocks.
        target_windows: layout of the layers' raw keys.
        mtp_windows: layout of the MTP blocks' raw keys.
        device: where the state lives.
    """

    layers: tuple[LayerState, ...]
    mtp: tuple[LayerState, ...]
    target_windows: WindowLayout
    mtp_windows: WindowLayout
    device: torch.device

    @classmethod
    def allocate(
        cls, shape: StateShape, num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> RowStore:
        """Allocate zeroed state.

        Args:
            shape: sizes per slot.
            num_slots: seats.
            dtype: of keys, compressor inputs and entries.
            device: where they live.

        Returns:
            The store.
        """
        like = torch.empty(0, dtype=dtype, device=device)
        return cls(
            tuple(LayerState.allocate(layer, num_slots, like) for layer in shape.layers),
            tuple(LayerState.allocate(layer, num_slots, like) for layer in shape.mtp),
            window_layout(shape, num_slots),
            window_layout(shape, num_slots),
            like.device,
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, slot first."""
        return tuple(tensor for layer in (*self.layers, *self.mtp) for tensor in layer.tensors())

    def clear(self, slot: int) -> None:
        """Zero a slot. Masked cells take no weight, but 0 · NaN is NaN: a failed row must not outlive its seat."""
        for tensor in self.tensors():
            tensor[slot].zero_()
        self.target_windows.clear(slot)
        self.mtp_windows.clear(slot)

    def target_view(self, segments: Sequence[Segment], ratios: Sequence[int]) -> BatchView:
        """Make room for a target forward over these segments, and lay it out; `ratios` as of `BatchView.build`."""
        self.target_windows.make_room(segments, [layer.window for layer in self.layers])
        return BatchView.build(segments, self.target_windows, ratios, self.device)

    def mtp_view(self, segments: Sequence[Segment]) -> BatchView:
        """The same for a forward of the MTP block, which has no entries."""
        self.mtp_windows.make_room(segments, [layer.window for layer in self.mtp])
        return BatchView.build(segments, self.mtp_windows, (), self.device)
