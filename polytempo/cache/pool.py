"""Who holds which block of entries. Integers only, no torch.

Entries and indexer keys grow with a row's tokens, so they lie in blocks that rows take as they grow and give back when
they end: memory follows live tokens, not rows times max_model_len. All layers of one ratio share their block numbers.

    ratio 4, blocks of 64 entries, 256 tokens each     slot 0, 600 tokens -> blocks 3 1 7     slot 1, 20 -> 5
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from polytempo.cache.layout import BLOCK, StateShape, num_entries, round_up
from polytempo.errors import CapacityError, ConfigError, InvariantError

NULL_BLOCK = 0
"""What a table holds where a slot has no block. Its tensors stay zero, and nothing reads it unmasked."""
GROWTH = 4
"""A pool that is full grows by a GROWTH-th part, so that growing copies each block a bounded number of times."""


def num_blocks(num_tokens: int, ratio: int) -> int:
    """Blocks that hold the entries which num_tokens tokens complete."""
    return round_up(num_entries(num_tokens, ratio), BLOCK) // BLOCK


@dataclass
class RatioPool:
    """The blocks of one ratio.

    Attributes:
        ratio: 4 or 128.
        block_bytes: of one block in all layers of this ratio.
        table: [slots, most blocks of a row] int64, block numbers in order of entry; NULL_BLOCK past the row's own.
        counts: blocks of each slot, as its table says; kept, since every step asks for all of them.
        size: blocks that the tensors must have, NULL_BLOCK included.
        free: blocks that no slot holds, a heap.
        fresh: blocks that were handed out and not yet zeroed.
    """

    ratio: int
    block_bytes: int
    table: np.ndarray
    counts: list[int]
    size: int = 1
    free: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)

    def held(self, slot: int) -> int:
        """Blocks of a slot."""
        return self.counts[slot]

    def missing(self, slot: int, num_tokens: int) -> int:
        """Blocks that a slot lacks to hold num_tokens tokens."""
        return max(0, num_blocks(num_tokens, self.ratio) - self.held(slot))


class EntryPool:
    """Blocks of all ratios under one budget.

    Args:
        shape: of the state.
        num_slots: seats.
        bytes_per_element: of the state's dtype.
        memory: bytes that the rings of all slots and all blocks may take together, None for no bound.

    Attributes:
        ratios: pools by ratio.
        budget: bytes that all blocks may take, None for no bound but max_model_len.

    Raises:
        ConfigError: so little memory does not hold one row of max_model_len.
    """

    def __init__(self, shape: StateShape, num_slots: int, bytes_per_element: int, memory: int | None = None) -> None:
        rings = num_slots * shape.slot_bytes(bytes_per_element)
        self.budget = None if memory is None else memory - rings
        self.ratios: dict[int, RatioPool] = {}
        for ratio in sorted({layer.ratio for layer in shape.layers if layer.ratio}):
            layers = [layer for layer in shape.layers if layer.ratio == ratio]
            width = sum(layer.head_dim + layer.index_head_dim for layer in layers)
            table = np.full((num_slots, layers[0].max_entries // BLOCK), NULL_BLOCK, dtype=np.int64)
            self.ratios[ratio] = RatioPool(ratio, BLOCK * width * bytes_per_element, table, [0] * num_slots)
        needed = sum(pool.block_bytes * (1 + pool.table.shape[1]) for pool in self.ratios.values())
        if memory is not None and rings + needed > memory:
            raise ConfigError(
                f"engine option 'memory' is {memory} bytes; the rings of {num_slots} rows take {rings} and entries of "
                f"one row of max_model_len {needed}, so it must be at least {rings + needed}; or lower max_rows or "
                "max_model_len"
            )

    @property
    def num_bytes(self) -> int:
        """Bytes that the blocks take now, free ones included."""
        return sum(pool.size * pool.block_bytes for pool in self.ratios.values())

    def holds(self, slot: int, num_tokens: int) -> bool:
        """Whether a slot has the blocks for num_tokens tokens already."""
        return all(num_entries(num_tokens, ratio) <= pool.counts[slot] * BLOCK for ratio, pool in self.ratios.items())

    def fits(self, wanted: dict[int, int]) -> bool:
        """Whether every slot of `wanted` (slot -> tokens) can have the blocks for so many tokens, all at once."""
        growth = 0
        for pool in self.ratios.values():
            missing = sum(pool.missing(slot, num_tokens) for slot, num_tokens in wanted.items())
            growth += max(0, missing - len(pool.free)) * pool.block_bytes
        return self.budget is None or self.num_bytes + growth <= self.budget

    def most_tokens(self, slot: int, wanted: int) -> int:
        """The most tokens up to `wanted` that a slot could hold now."""
        if self.fits({slot: wanted}):
            return wanted
        spans = [pool.ratio * BLOCK for pool in self.ratios.values()]
        # A row runs out at a block's end: one token less than what would complete the next block's first entry.
        ends = sorted({
            span * count + pool.ratio - 1
            for span, pool in zip(spans, self.ratios.values(), strict=True)
            for count in range(num_blocks(wanted, pool.ratio) + 1)
            if span * count + pool.ratio - 1 < wanted
        }, reverse=True)  # fmt: skip
        return next((end for end in ends if self.fits({slot: end})), 0)

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Give a slot the blocks for num_tokens tokens.

        Raises:
            CapacityError: the budget does not allow it; nothing was given.
        """
        if self.holds(slot, num_tokens):
            return
        if not self.fits({slot: num_tokens}):
            raise CapacityError(
                f"slot {slot} needs blocks for {num_tokens} tokens; {self.num_bytes} of {self.budget} bytes are taken "
                f"and {[len(pool.free) for pool in self.ratios.values()]} blocks free (ratios {list(self.ratios)})"
            )
        missing_of = {ratio: pool.missing(slot, num_tokens) for ratio, pool in self.ratios.items()}
        lacking = {ratio: max(0, missing_of[ratio] - len(pool.free)) for ratio, pool in self.ratios.items()}
        promised = sum(lacking[ratio] * pool.block_bytes for ratio, pool in self.ratios.items())
        for ratio, pool in self.ratios.items():
            missing = missing_of[ratio]
            promised -= lacking[ratio] * pool.block_bytes
            if lacking[ratio]:
                self._grow(pool, lacking[ratio], promised)
            held = pool.held(slot)
            for place in range(held, held + missing):
                block = heapq.heappop(pool.free)
                pool.table[slot, place] = block
                pool.fresh.append(block)
            pool.counts[slot] += missing

    def _grow(self, pool: RatioPool, least: int, promised: int) -> None:
        """Add at least `least` blocks, and more only of what is left when the other ratios took `promised` bytes."""
        count = max(least, pool.size // GROWTH)
        if self.budget is not None:
            count = min(count, max(least, (self.budget - self.num_bytes - promised) // pool.block_bytes))
        most = 1 + pool.table.size
        count = min(count, most - pool.size)
        for block in range(pool.size, pool.size + count):
            heapq.heappush(pool.free, block)
        pool.size += count

    def release(self, slot: int) -> None:
        """Take back a slot's blocks."""
        for pool in self.ratios.values():
            for block in pool.table[slot, : pool.held(slot)].tolist():
                heapq.heappush(pool.free, block)
            pool.table[slot] = NULL_BLOCK
            pool.counts[slot] = 0

    def shrink(self) -> None:
        """Give back all blocks, if no slot holds one."""
        for pool in self.ratios.values():
            if len(pool.free) == pool.size - 1:
                pool.size = NULL_BLOCK + 1
                pool.free.clear()
                pool.fresh.clear()

    def check(self) -> None:
        """Raise InvariantError unless every block is held by exactly one slot or free, and tables have no gaps."""
        for pool in self.ratios.values():
            held = pool.table[pool.table != NULL_BLOCK].tolist()
            if sorted(held + pool.free) != list(range(1, pool.size)):
                raise InvariantError(
                    f"ratio {pool.ratio}: blocks held {sorted(held)} and free {sorted(pool.free)} are not "
                    f"1..{pool.size - 1}"
                )
            for slot in range(pool.table.shape[0]):
                is_held = pool.table[slot] != NULL_BLOCK
                if is_held.sum() != pool.held(slot) or not is_held[: pool.held(slot)].all():
                    raise InvariantError(
                        f"ratio {pool.ratio}: slot {slot} has {pool.held(slot)} blocks; its table is {pool.table[slot]}"
                    )
        if self.budget is not None and self.num_bytes > self.budget:
            raise InvariantError(f"blocks take {self.num_bytes} bytes of {self.budget}")
