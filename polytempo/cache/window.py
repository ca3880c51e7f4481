"""Where raw keys lie, and in which columns attention meets them: the two layouts of the sliding window.

`ring` keeps position p in cell p mod capacity and meets it in column p: neither depends on other rows. In
`left_aligned` all rows of a forward end at one shared column, so row r starts with a dead prefix, its lead, of
longest − own columns. Engines with contiguous caches must do this; here it is the baseline for `ring`.

    ring            columns 0 1 2 3 4 5        left_aligned    columns 0 1 2 3 4 5
    row a, 6 tokens         a a a a a a        row a                   a a a a a a
    row b, 4 tokens         b b b b . .        row b, lead 2           . . b b b b

A lead is a function of the rows' lengths in this forward alone, so dead prefixes cannot accumulate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from polytempo.cache.layout import Segment, StateShape
from polytempo.errors import InvariantError


class WindowLayout(Protocol):
    """Maps (slot, position) to a cell of the raw keys, and says by how much a row's columns are shifted.

    Attributes:
        name: the engine option `kv_layout` that chooses it.
        window: config field `sliding_window`.
        per_row_positions: whether rows may advance by different counts; see `polytempo.engine.capability`.
    """

    name: str
    window: int
    per_row_positions: bool

    def leads(self, ends: np.ndarray, shared_end: int, num_rows: int) -> np.ndarray:
        """Columns before position 0 of each row.

        Args:
            ends: [R] int64, position after each row's last token in this forward.
            shared_end: columns of the forward, where its longest row ends.
            num_rows: R, rows of the forward.

        Returns:
            [R] int64; position p of row r is column p + leads[r].
        """

    def cells(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Cells [...] of these positions; for positions that the row does not hold, any valid cell."""

    def make_room(self, segments: Sequence[Segment], windows: Sequence[Tensor]) -> None:
        """Make sure that the segments' positions have cells; `windows` are [slots, cells, …], one per layer."""

    def clear(self, slot: int) -> None:
        """Forget what is known of a slot."""


@dataclass(frozen=True)
class RingLayout:
    """Cell = position mod capacity: no alignment, no copy, no dead column.

    Attributes:
        window: config field `sliding_window`.
        num_cells: capacity per slot, at least window − 1 + the widest segment.
    """

    window: int
    num_cells: int
    name: str = "ring"
    per_row_positions: bool = True

    def leads(self, ends: np.ndarray, shared_end: int, num_rows: int) -> np.ndarray:
        """Zeros: column p holds position p in every row."""
        return np.zeros(num_rows, dtype=np.int64)

    def cells(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """As `WindowLayout.cells`."""
        return positions % self.num_cells

    def make_room(self, segments: Sequence[Segment], windows: Sequence[Tensor]) -> None:
        """A ring always has room: what it overwrites has left every window."""

    def clear(self, slot: int) -> None:
        """A ring knows nothing of its slots."""


@dataclass
class LeftAlignedLayout:
    """Contiguous cells from a start position per slot; rows of a forward end at one shared column.

    Attributes:
        window: config field `sliding_window`.
        num_cells: capacity per slot; `kept` is what a copy keeps.
        kept: positions before a forward's first that must stay: window − 1, and as many as a rewind can reopen.
        starts: [slots] int64, the position that cell 0 of each slot holds. Realigning moves it; keys move only
            when the capacity forces it.
        num_copies: how often it did, over all slots.
    """

    window: int
    num_cells: int
    kept: int
    starts: np.ndarray
    num_copies: int = 0
    name: str = "left_aligned"
    per_row_positions: bool = field(default=True)

    def leads(self, ends: np.ndarray, shared_end: int, num_rows: int) -> np.ndarray:
        """shared_end − ends.

        Args:
            ends: [R] int64, position after each row's last token.
            shared_end: the column at which all rows end.
            num_rows: R.

        Returns:
            [R] int64, never negative, 0 for the longest row.

        Raises:
            InvariantError: there is not one position per row, a row is ahead of the shared end column, or no row is
                at it.
        """
        if len(ends) != num_rows:
            raise InvariantError(f"the position vector has {len(ends)} entries; {num_rows} rows need {num_rows}")
        if ends.max() > shared_end:
            row = int(ends.argmax())
            raise InvariantError(f"row {row} ends at {ends[row]}, ahead of the shared end column {shared_end}")
        if ends.max() < shared_end:
            raise InvariantError(
                f"no row is at the shared end column {shared_end}; the longest ends at {ends.max()}, and columns that "
                "are dead in every row must be stripped"
            )
        return shared_end - ends

    def cells(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """As `WindowLayout.cells`."""
        return (positions - self.starts[slots]).clip(0, self.num_cells - 1)

    def make_room(self, segments: Sequence[Segment], windows: Sequence[Tensor]) -> None:
        """Drop the oldest keys of slots whose segment would run past their last cell.

        Raises:
            InvariantError: a segment starts where the keys of its window are already gone.
        """
        for segment in segments:
            start = self.starts[segment.slot]
            if max(0, segment.start - self.window + 1) < start:
                raise InvariantError(
                    f"slot {segment.slot} goes back to position {segment.start}, but its raw keys start at {start}; a "
                    f"window of {self.window} needs them from {segment.start - self.window + 1} on"
                )
            if segment.end - start > self.num_cells:
                self._drop(segment.slot, segment.start - self.kept - int(start), windows)

    def _drop(self, slot: int, count: int, windows: Sequence[Tensor]) -> None:
        num_left = self.num_cells - count
        if num_left > 0:
            for window in windows:
                window[slot, :num_left] = window[slot, count:].clone()
        self.starts[slot] += count
        self.num_copies += 1

    def clear(self, slot: int) -> None:
        """The slot's next owner starts at position 0."""
        self.starts[slot] = 0


def window_layout(shape: StateShape, num_slots: int) -> WindowLayout:
    """The layout that a state was sized for; target and MTP block need one each, since they feed other positions."""
    if shape.kv_layout == "ring":
        return RingLayout(shape.window, shape.window_cells)
    return LeftAlignedLayout(shape.window, shape.window_cells, shape.kept_cells, np.zeros(num_slots, dtype=np.int64))
