"""What one forward may see: packed tokens with their slots and positions, and the index tensors they imply.

Built once per forward from integers, read by every layer, thrown away after. Masks, ring cells, entries and
tiles are all functions of (slot, position).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polytempo.cache.layout import BLOCK, OVERLAP_RATIO, Segment, num_window_blocks, round_up

TILE_WIDTHS = (1, 8, BLOCK)
"""Queries per tile. Single tokens must not pay for chunks, nor short runs for long ones."""


@dataclass(frozen=True)
class TileGroup:
    """Tiles of one width: a tile is consecutive queries of one row within one aligned block of positions.

    N tiles of Q queries; a tile with fewer tokens repeats its first, and the repeats are dropped.

    Attributes:
        token_idx: [N, Q] int64, the queries' places among the packed tokens.
        slots: [N] int64.
        positions: [N, Q] int64.
        key_positions: [N, C] int64, C window columns in aligned blocks; may be negative or in the future.
        window_mask: [N, Q, C] bool, True where the query sees the key.
        kept: [K] int64, places in the flattened [N · Q] results that belong to tokens.
        kept_token_idx: [K] int64, the packed token of each.
    """

    token_idx: Tensor
    slots: Tensor
    positions: Tensor
    key_positions: Tensor
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

    Attributes:
        token_ids: [T] int64.
        slots: [T] int64.
        positions: [T] int64.
        groups: the tiles, by width.
        completed: per ratio that the model uses.
        max_visible: per ratio, most entries that any query of the batch sees; host integers, so that layers
            need no synchronisation.
        last_token_idx: [R] int64, place of each segment's last token.
    """

    token_ids: Tensor
    slots: Tensor
    positions: Tensor
    groups: tuple[TileGroup, ...]
    completed: dict[int, CompletedEntries]
    max_visible: dict[int, int]
    last_token_idx: Tensor

    @classmethod
    def build(
        cls, segments: Sequence[Segment], window: int, ratios: Sequence[int], device: torch.device | str = "cpu"
    ) -> BatchView:
        """Lay out a forward over these segments.

        Args:
            segments: one per row, any mixture of lengths; checked by `check_segments`.
            window: config field `sliding_window`.
            ratios: ratios in use; 0 is ignored.
            device: where the index tensors go.

        Returns:
            The view.
        """
        counts = np.array([len(segment.token_ids) for segment in segments])
        ends = counts.cumsum()
        segment_of = np.repeat(np.arange(len(segments)), counts)
        starts = np.array([segment.start for segment in segments])
        positions = starts[segment_of] + np.arange(ends[-1]) - (ends - counts)[segment_of]
        slots = np.array([segment.slot for segment in segments])[segment_of]
        token_ids = np.fromiter((token for s in segments for token in s.token_ids), np.int64, ends[-1])

        def to_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        used = sorted({ratio for ratio in ratios if ratio})
        return cls(
            token_ids=to_device(token_ids),
            slots=to_device(slots),
            positions=to_device(positions),
            groups=_tile_groups(segment_of, positions, slots, window, to_device),
            completed={ratio: _completed(positions, slots, ratio, to_device) for ratio in used},
            max_visible={ratio: int(positions.max() + 1) // ratio for ratio in used},
            last_token_idx=to_device(ends - 1),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids.shape[0]


def _tile_groups(segment_of, positions, slots, window: int, to_device) -> tuple[TileGroup, ...]:
    num_tokens = len(positions)
    block = positions // BLOCK
    is_first = np.ones(num_tokens, dtype=bool)
    is_first[1:] = (segment_of[1:] != segment_of[:-1]) | (block[1:] != block[:-1])
    first = np.flatnonzero(is_first)
    count = np.diff(np.append(first, num_tokens))
    width_of = np.array(TILE_WIDTHS)[np.searchsorted(TILE_WIDTHS, count)]
    groups = []
    for width in TILE_WIDTHS:
        chosen = width_of == width
        if chosen.any():
            groups.append(_tile_group(first[chosen], count[chosen], width, positions, slots, window, to_device))
    return tuple(groups)


def _tile_group(first, count, width: int, positions, slots, window: int, to_device) -> TileGroup:
    offset = np.arange(width)
    is_token = offset < count[:, None]
    token_idx = np.where(is_token, first[:, None] + offset, first[:, None])
    query = positions[token_idx]
    num_blocks = num_window_blocks(window)
    base = (positions[first] // BLOCK - (num_blocks - 1)) * BLOCK
    key = base[:, None] + np.arange(num_blocks * BLOCK)
    seen = (key[:, None] >= 0) & (key[:, None] <= query[..., None]) & (key[:, None] > query[..., None] - window)
    kept = np.flatnonzero(is_token)
    return TileGroup(
        token_idx=to_device(token_idx),
        slots=to_device(slots[first]),
        positions=to_device(query),
        key_positions=to_device(key),
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


def padded_entries(max_visible: int) -> int:
    """Entry columns to read so that every query's visible entries are covered, in whole blocks."""
    return round_up(max_visible, BLOCK)
