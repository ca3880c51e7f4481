"""What one forward may see: packed tokens with their slots and positions, and the index tensors they imply.

Built once per forward from integers, read by every layer, thrown away after. Masks, ring cells, entries and
tiles are all functions of (slot, position).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from polytempo.cache.layout import BLOCK, OVERLAP_RATIO, Segment, num_window_blocks, round_up
from polytempo.cache.window import WindowLayout
from polytempo.device import to_device, upload

TILE_WIDTHS = (1, 8, BLOCK)
"""Queries per tile. Single tokens must not pay for chunks, nor short runs for long ones."""


@dataclass(frozen=True)
class TileGroup:
    """Tiles of one width: a tile is consecutive queries of one row within one aligned block of columns.

    N tiles of Q queries; a tile with fewer tokens repeats its first, and the repeats are dropped. If all tiles have
    the same positions (a uniform batch, one row included), what follows from positions is held once: U is 1 then,
    and N otherwise.

    Attributes:
        token_idx: [N, Q] int64, the queries' places among the packed tokens.
        segment_idx: [N] int64, each tile's place among the segments.
        slots: [N] int64.
        positions: [U, Q] int64.
        key_positions: [U, C] int64, C window columns in aligned blocks; may be negative or in the future.
        key_cells: [N, C] int64, their cells in the raw keys.
        window_mask: [U, Q, C] bool, True where the query sees the key.
        kept: [K] int64, places in the flattened [N · Q] results that belong to tokens.
        kept_token_idx: [K] int64, the packed token of each.
    """

    token_idx: Tensor
    segment_idx: Tensor
    slots: Tensor
    positions: Tensor
    key_positions: Tensor
    key_cells: Tensor
    window_mask: Tensor
    kept: Tensor
    kept_token_idx: Tensor

    @property
    def num_queries(self) -> int:
        """Q, queries per tile."""
        return self.token_idx.shape[1]


@dataclass(frozen=True)
class CompletedEntries:
    """Entries whose last token is in this forward.

    Attributes:
        slots: [N] int64.
        entry_ids: [N] int64.
        input_positions: [N, num_inputs] int64, ascending; negative before the row's start.
    """

    slots: Tensor
    entry_ids: Tensor
    input_positions: Tensor


@dataclass(frozen=True)
class BatchView:
    """The packed tokens of one forward.

    What only the torch path reads is made when it is first asked for: the kernels work from slots and positions.

    Attributes:
        packed: the integers that all else follows from.
        layout: of the raw keys.
        device: where the index tensors go.
        token_ids: [T] int64.
        slots: [T] int64.
        positions: [T] int64.
        block_tables: per ratio, [slots, most blocks] int64: where each slot's entries lie.
        max_visible: per ratio, most entries that any query of the batch sees; host integers, so that layers
            need no synchronisation.
        per_row_positions: masks are functions of each token's own position.
    """

    per_row_positions: ClassVar[bool] = True
    packed: Packed
    layout: WindowLayout
    device: torch.device
    token_ids: Tensor
    slots: Tensor
    positions: Tensor
    block_tables: dict[int, Tensor]
    max_visible: dict[int, int]

    @classmethod
    def build(
        cls,
        segments: Sequence[Segment],
        layout: WindowLayout,
        ratios: Sequence[int],
        device: torch.device | str = "cpu",
        block_tables: Mapping[int, np.ndarray] | None = None,
    ) -> BatchView:
        """Lay out a forward over these segments.

        Args:
            segments: one per row, any mixture of lengths; checked by `check_segments`.
            layout: of the raw keys; it has made room for the segments.
            ratios: ratios in use; 0 is ignored.
            device: where the index tensors go.
            block_tables: per ratio, the blocks of each slot's entries [slots, most blocks] int64.

        Returns:
            The view.
        """
        packed = Packed.build(segments, layout)
        device = torch.device(device)
        tables = block_tables or {}
        tokens, *uploaded = upload([packed.tokens, *tables.values()], device)
        token_ids, slots, positions = tokens
        return cls(
            packed=packed,
            layout=layout,
            device=device,
            token_ids=token_ids,
            slots=slots,
            positions=positions,
            block_tables=dict(zip(tables, uploaded, strict=True)),
            max_visible={ratio: packed.longest // ratio for ratio in ratios if ratio},
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids.shape[0]

    @property
    def num_columns(self) -> int:
        """Columns of raw keys that the forward spans, where its longest row ends."""
        return self.packed.longest

    @property
    def most_tokens(self) -> int:
        """Tokens of the widest segment."""
        return int(self.packed.counts.max())

    @cached_property
    def leads(self) -> Tensor:
        """[R] int64, columns before position 0 of each segment's row; zeros at layout `ring`."""
        return to_device(self.packed.leads, self.device)

    @cached_property
    def ends(self) -> Tensor:
        """[R] int64, position after each segment's last token."""
        return to_device(self.packed.ends, self.device)

    @cached_property
    def first_token_idx(self) -> list[int]:
        """R, place of each segment's first token; of the host, since the step counts with it."""
        return list(accumulate([len(segment.token_ids) for segment in self.packed.segments[:-1]], initial=0))

    @cached_property
    def window_cells(self) -> Tensor:
        """[T] int64, the tokens' cells in the raw keys."""
        return to_device(self.layout.cells(self.packed.slots, self.packed.positions), self.device)

    @cached_property
    def groups(self) -> tuple[TileGroup, ...]:
        """The tiles, by width."""
        return _tile_groups(self.packed, self.layout, self.device)

    @cached_property
    def completed(self) -> dict[int, CompletedEntries]:
        """Per ratio, the entries whose last token is in this forward."""
        packed, ratios = self.packed, list(self.max_visible)
        parts = [_completed(packed.positions, packed.slots, ratio) for ratio in ratios]
        found = iter(upload([array for part in parts for array in part], self.device))
        return {ratio: CompletedEntries(next(found), next(found), next(found)) for ratio in ratios}


@dataclass(frozen=True)
class Packed:
    """The integers of a forward. Single-token steps are short: what the kernels do not read is made when asked for.

    Attributes:
        segments: R.
        layout: of the raw keys.
        tokens: [3, T] int64: id, slot and position of each token.
        longest: where the longest row ends.
    """

    segments: Sequence[Segment]
    layout: WindowLayout
    tokens: np.ndarray
    longest: int

    @classmethod
    def build(cls, segments: Sequence[Segment], layout: WindowLayout) -> Packed:
        ids = [token_id for segment in segments for token_id in segment.token_ids]
        slots = [segment.slot for segment in segments for _ in segment.token_ids]
        positions = [position for segment in segments for position in range(segment.start, segment.end)]
        longest = max(segment.end for segment in segments)
        return cls(segments, layout, np.array((ids, slots, positions), dtype=np.int64), longest)

    @property
    def slots(self) -> np.ndarray:
        """[T]."""
        return self.tokens[1]

    @property
    def positions(self) -> np.ndarray:
        """[T]."""
        return self.tokens[2]

    @cached_property
    def counts(self) -> np.ndarray:
        """[R], tokens of each segment."""
        return np.array([len(segment.token_ids) for segment in self.segments])

    @cached_property
    def ends(self) -> np.ndarray:
        """[R], position after each segment's last token."""
        return np.array([segment.end for segment in self.segments])

    @cached_property
    def leads(self) -> np.ndarray:
        """[R], columns before position 0 of each segment's row."""
        return self.layout.leads(self.ends, self.longest, len(self.segments))

    @cached_property
    def segment_of(self) -> np.ndarray:
        """[T], place of each token's segment."""
        return np.arange(len(self.segments)).repeat(self.counts)


def _tile_groups(packed: Packed, layout: WindowLayout, device: torch.device) -> tuple[TileGroup, ...]:
    num_tokens = len(packed.positions)
    block = (packed.positions + packed.leads[packed.segment_of]) // BLOCK
    is_first = np.ones(num_tokens, dtype=bool)
    is_first[1:] = (np.diff(packed.segment_of) != 0) | (np.diff(block) != 0)
    first = np.flatnonzero(is_first)
    count = np.diff(np.append(first, num_tokens))
    width_of = np.array(TILE_WIDTHS)[np.searchsorted(TILE_WIDTHS, count)]
    groups = []
    for width in TILE_WIDTHS:
        chosen = width_of == width
        if chosen.any():
            groups.append(_tile_group(first[chosen], count[chosen], width, packed, layout, device))
    return tuple(groups)


def _tile_group(first, count, width: int, packed: Packed, layout: WindowLayout, device: torch.device) -> TileGroup:
    offset = np.arange(width)
    is_token = offset < count[:, None]
    token_idx = np.where(is_token, first[:, None] + offset, first[:, None])
    slots, segment_idx = packed.slots[first], packed.segment_of[first]
    query, lead = packed.positions[token_idx], packed.leads[segment_idx]
    num_blocks = num_window_blocks(layout.window)
    base = ((packed.positions[first] + lead) // BLOCK - (num_blocks - 1)) * BLOCK - lead
    key = base[:, None] + np.arange(num_blocks * BLOCK)
    cells = layout.cells(slots[:, None], key)
    if (query == query[:1]).all() and (base == base[0]).all():
        query, key = query[:1], key[:1]
    seen = (key[:, None] >= 0) & (key[:, None] <= query[..., None]) & (key[:, None] > query[..., None] - layout.window)
    kept = np.flatnonzero(is_token)
    fields = {
        "token_idx": token_idx, "segment_idx": segment_idx, "slots": slots, "positions": query, "key_positions": key,
        "key_cells": cells, "kept": kept, "kept_token_idx": token_idx.reshape(-1)[kept],
    }  # fmt: skip
    uploaded = dict(zip(fields, upload(list(fields.values()), device), strict=True))
    return TileGroup(window_mask=to_device(seen, device), **uploaded)


def _completed(positions, slots, ratio: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fields of `CompletedEntries`."""
    ends_span = (positions + 1) % ratio == 0
    last = positions[ends_span]
    num_inputs = ratio * (2 if ratio == OVERLAP_RATIO else 1)
    inputs = last[:, None] + 1 - num_inputs + np.arange(num_inputs)
    return slots[ends_span], last // ratio, inputs


def num_entry_blocks(max_visible: int) -> int:
    """Blocks of entries to read so that every query's visible entries are covered."""
    return round_up(max_visible, BLOCK) // BLOCK
