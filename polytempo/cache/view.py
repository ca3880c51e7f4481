"""What one forward may see: packed tokens with their slots and positions, and the index tensors they imply.

Built once per forward from integers, read by every layer, thrown away after. Masks, ring cells, entries and
tiles are all functions of (slot, position).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from polytempo.cache.layout import BLOCK, OVERLAP_RATIO, Segment, num_window_blocks, round_up
from polytempo.cache.window import WindowLayout

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

    @property
    def is_uniform(self) -> bool:
        """Whether one set of positions serves all tiles."""
        return self.positions.shape[0] == 1


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

    Attributes:
        token_ids: [T] int64.
        slots: [T] int64.
        positions: [T] int64.
        window_cells: [T] int64, the tokens' cells in the raw keys.
        leads: [R] int64, columns before position 0 of each segment's row; zeros at layout `ring`.
        ends: [R] int64, position after each segment's last token.
        num_columns: columns of raw keys that the forward spans, where its longest row ends.
        most_tokens: tokens of its widest segment.
        groups: the tiles, by width.
        completed: per ratio that the model uses.
        max_visible: per ratio, most entries that any query of the batch sees; host integers, so that layers
            need no synchronisation.
        block_tables: per ratio, [slots, most blocks] int64: where each slot's entries lie.
        last_token_idx: [R] int64, place of each segment's last token.
        per_row_positions: masks are functions of each token's own position.
    """

    per_row_positions: ClassVar[bool] = True
    token_ids: Tensor
    slots: Tensor
    positions: Tensor
    window_cells: Tensor
    leads: Tensor
    ends: Tensor
    num_columns: int
    most_tokens: int
    groups: tuple[TileGroup, ...]
    completed: dict[int, CompletedEntries]
    max_visible: dict[int, int]
    block_tables: dict[int, Tensor]
    last_token_idx: Tensor

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
        packed = _Packed.build(segments, layout)

        def to_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        used = sorted({ratio for ratio in ratios if ratio})
        return cls(
            token_ids=to_device(packed.token_ids),
            slots=to_device(packed.slots),
            positions=to_device(packed.positions),
            window_cells=to_device(layout.cells(packed.slots, packed.positions)),
            leads=to_device(packed.leads),
            ends=to_device(packed.ends),
            num_columns=int(packed.ends.max()),
            most_tokens=int(packed.counts.max()),
            groups=_tile_groups(packed, layout, to_device),
            completed={ratio: _completed(packed.positions, packed.slots, ratio, to_device) for ratio in used},
            max_visible={ratio: int(packed.positions.max() + 1) // ratio for ratio in used},
            block_tables={ratio: to_device(table) for ratio, table in (block_tables or {}).items()},
            last_token_idx=to_device(packed.counts.cumsum() - 1),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids.shape[0]


@dataclass(frozen=True)
class _Packed:
    """The integers of a forward: counts, ends and leads [R]; segment_of, slots, positions and token_ids [T]."""

    counts: np.ndarray
    ends: np.ndarray
    leads: np.ndarray
    segment_of: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    token_ids: np.ndarray

    @classmethod
    def build(cls, segments: Sequence[Segment], layout: WindowLayout) -> _Packed:
        counts = np.array([len(segment.token_ids) for segment in segments])
        starts = np.array([segment.start for segment in segments])
        last = counts.cumsum()
        ends = starts + counts
        segment_of = np.repeat(np.arange(len(segments)), counts)
        return cls(
            counts=counts,
            ends=ends,
            leads=layout.leads(ends, int(ends.max()), len(segments)),
            segment_of=segment_of,
            slots=np.array([segment.slot for segment in segments])[segment_of],
            positions=starts[segment_of] + np.arange(last[-1]) - (last - counts)[segment_of],
            token_ids=np.fromiter((token for s in segments for token in s.token_ids), np.int64, last[-1]),
        )


def _tile_groups(packed: _Packed, layout: WindowLayout, to_device) -> tuple[TileGroup, ...]:
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
            groups.append(_tile_group(first[chosen], count[chosen], width, packed, layout, to_device))
    return tuple(groups)


def _tile_group(first, count, width: int, packed: _Packed, layout: WindowLayout, to_device) -> TileGroup:
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
    return TileGroup(
        token_idx=to_device(token_idx),
        segment_idx=to_device(segment_idx),
        slots=to_device(slots),
        positions=to_device(query),
        key_positions=to_device(key),
        key_cells=to_device(cells),
        window_mask=to_device(seen),
        kept=to_device(kept),
        kept_token_idx=to_device(token_idx.reshape(-1)[kept]),
    )


def _completed(positions, slots, ratio: int, to_device) -> CompletedEntries:
    ends_span = (positions + 1) % ratio == 0
    last = positions[ends_span]
    num_inputs = ratio * (2 if ratio == OVERLAP_RATIO else 1)
    inputs = last[:, None] + 1 - num_inputs + np.arange(num_inputs)
    return CompletedEntries(to_device(slots[ends_span]), to_device(last // ratio), to_device(inputs))


def num_entry_blocks(max_visible: int) -> int:
    """Blocks of entries to read so that every query's visible entries are covered."""
    return round_up(max_visible, BLOCK) // BLOCK
