"""Pure arithmetic of per-row state: position -> ring cell, position -> entry, and bytes. No torch.

A row's state has two anchors. Raw keys and compressor inputs matter only near the row's end, so they live in
rings: the cell of position p is p mod capacity, whoever else is in the batch. Entries are anchored at the
start: entry e is column e in every row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from polytempo.config import ModelConfig
from polytempo.engine_config import EngineConfig
from polytempo.errors import InvariantError

BLOCK = 64
"""Key columns that are reduced together. Blocks are aligned to absolute positions (or to the rank of an
entry), so a query's order of summation is a function of its own position alone."""

OVERLAP_RATIO = 4


def num_entries(num_tokens: int, ratio: int) -> int:
    """Entries that num_tokens tokens complete; also the entries that a query at position num_tokens − 1 sees."""
    return num_tokens // ratio


def round_up(count: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def num_window_blocks(window: int) -> int:
    """Aligned blocks that the window of any query can touch: its own, and those back to position p − window + 1."""
    return round_up(window - 1, BLOCK) // BLOCK + 1


@dataclass(frozen=True)
class LayerShape:
    """State of one layer, per slot.

    Attributes:
        ratio: 0, 4 or 128.
        window_cells: raw keys, in positions.
        input_cells: ring of compressor inputs, in positions; 0 for ratio 0.
        max_entries: columns for entries, a multiple of BLOCK; 0 for ratio 0.
        head_dim: channels of a key and of an entry.
        index_head_dim: channels of an index key; 0 unless the layer has an indexer.
    """

    ratio: int
    window_cells: int
    input_cells: int
    max_entries: int
    head_dim: int
    index_head_dim: int

    @property
    def input_width(self) -> int:
        """Channels of one compressor input (key-value half or gate half)."""
        return self.head_dim * (2 if self.ratio == OVERLAP_RATIO else 1)

    @property
    def num_slot_elements(self) -> int:
        """Stored numbers of what every slot owns: raw keys and compressor inputs."""
        inputs = self.input_cells * 2 * (self.input_width + 2 * self.index_head_dim)
        return self.window_cells * self.head_dim + inputs

    @property
    def num_elements(self) -> int:
        """Stored numbers of a slot whose entries are all there."""
        return self.num_slot_elements + self.max_entries * (self.head_dim + self.index_head_dim)


@dataclass(frozen=True)
class StateShape:
    """State of all layers and of the MTP block, per slot.

    Attributes:
        layers: decoder layers.
        mtp: MTP blocks.
        kv_layout: engine option, "ring" or "left_aligned".
        window: config field `sliding_window`.
        streams: (hc_mult, hidden_size), the shape of one position's streams.
        kept_cells: positions before a forward that `left_aligned` keeps when it drops old keys.
    """

    layers: tuple[LayerShape, ...]
    mtp: tuple[LayerShape, ...]
    kv_layout: str
    window: int
    kept_cells: int
    streams: tuple[int, int]

    @classmethod
    def build(cls, model: ModelConfig, engine: EngineConfig) -> StateShape:
        """Size the state of a model under an engine's limits.

        Args:
            model: gives ratios, window and widths.
            engine: max_model_len bounds the entries, max_chunk the rings.

        Returns:
            The shape.
        """
        layers = tuple(_layer_shape(model, engine, ratio) for ratio in model.compress_ratios)
        mtp = tuple(_layer_shape(model, engine, ratio) for ratio in model.mtp_compress_ratios)
        streams = (model.hc_mult, model.hidden_size)
        return cls(layers, mtp, engine.kv_layout, model.sliding_window, _kept_cells(model, engine), streams)

    @property
    def window_cells(self) -> int:
        """Positions whose raw keys a slot holds, the same in every layer."""
        return (*self.layers, *self.mtp)[0].window_cells

    def slot_bytes(self, bytes_per_element: int) -> int:
        """Memory that every slot takes from the start, entries apart."""
        rings = sum(layer.num_slot_elements for layer in (*self.layers, *self.mtp))
        return (rings + self.num_stream_elements) * bytes_per_element

    @property
    def num_stream_elements(self) -> int:
        """Stored numbers of a slot's streams, kept for the MTP block."""
        return self.window * math.prod(self.streams) if self.mtp else 0

    def bytes_per_row(self, bytes_per_element: int) -> int:
        """Memory of one row of max_model_len tokens at this element size, the most that a row takes."""
        layers = sum(layer.num_elements for layer in (*self.layers, *self.mtp))
        return (layers + self.num_stream_elements) * bytes_per_element


def live_bytes(shape: StateShape, num_tokens: Sequence[int], num_slots: int, bytes_per_element: int) -> int:
    """What the state of rows must take at least: rings of every slot, and each row's own entries and indexer keys.

    Args:
        shape: of the state.
        num_tokens: tokens in the store, per running row.
        num_slots: slots whose rings are allocated.
        bytes_per_element: of the state's dtype.

    Returns:
        Bytes.
    """
    entries = sum(
        num_entries(count, layer.ratio) * (layer.head_dim + layer.index_head_dim)
        for layer in shape.layers if layer.ratio for count in num_tokens
    )  # fmt: skip
    return num_slots * shape.slot_bytes(bytes_per_element) + entries * bytes_per_element


def _kept_cells(model: ModelConfig, engine: EngineConfig) -> int:
    # The window before a forward's first position, and what a rewind of at most a chunk can reopen before that.
    return model.sliding_window - 1 + engine.max_chunk


def _window_cells(model: ModelConfig, engine: EngineConfig) -> int:
    if engine.kv_layout == "ring":
        # The chunk is written before it attends: its first query still needs the window before it.
        return model.sliding_window - 1 + engine.max_chunk
    # Twice what is kept, so that a copy is made room for many steps, and the widest segment.
    return 2 * _kept_cells(model, engine) + engine.max_chunk


def _layer_shape(model: ModelConfig, engine: EngineConfig, ratio: int) -> LayerShape:
    window_cells = _window_cells(model, engine)
    if not ratio:
        return LayerShape(0, window_cells, 0, 0, model.head_dim, 0)
    # The first entry that a chunk completes reads back over its own span and, with overlap, one more; a rewind
    # of at most a chunk reopens no span older than that.
    num_inputs = ratio * (2 if ratio == OVERLAP_RATIO else 1)
    max_entries = round_up(num_entries(engine.max_model_len, ratio), BLOCK)
    index_head_dim = model.index_head_dim if ratio == OVERLAP_RATIO else 0
    return LayerShape(
        ratio, window_cells, num_inputs - 1 + engine.max_chunk, max_entries, model.head_dim, index_head_dim
    )


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one row in one forward.

    Attributes:
        slot: the row's seat.
        start: position of the first token.
        token_ids: the tokens, at least one.
    """

    slot: int
    start: int
    token_ids: Sequence[int]

    def __post_init__(self) -> None:
        if self.slot < 0 or self.start < 0 or not len(self.token_ids):
            raise InvariantError(
                f"segment of slot {self.slot} has {len(self.token_ids)} tokens from position {self.start}; it needs "
                "a slot and a position of at least 0 and one token"
            )

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)


def check_segments(segments: Sequence[Segment], engine: EngineConfig) -> None:
    """Refuse a forward that the state could not hold.

    Args:
        segments: one per row of the forward.
        engine: the limits that the state was sized for.

    Raises:
        InvariantError: no segment, a slot used twice or out of range, a segment wider than max_chunk or past
            max_model_len.
    """
    if not segments:
        raise InvariantError("a forward needs at least one segment")
    slots = [segment.slot for segment in segments]
    if len(set(slots)) != len(slots):
        raise InvariantError(f"slots {sorted(s for s in set(slots) if slots.count(s) > 1)} appear twice in one forward")
    for segment in segments:
        if segment.slot >= engine.max_rows:
            raise InvariantError(f"slot {segment.slot} does not exist; max_rows is {engine.max_rows}")
        if len(segment.token_ids) > engine.max_chunk:
            raise InvariantError(
                f"slot {segment.slot} brings {len(segment.token_ids)} tokens into one forward, more than "
                f"max_chunk ({engine.max_chunk})"
            )
        if segment.end > engine.max_model_len:
            raise InvariantError(
                f"slot {segment.slot} would reach position {segment.end - 1}; max_model_len is {engine.max_model_len}"
            )
