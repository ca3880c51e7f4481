"""Who runs, and what each row brings into the next forward. Integers only, no torch."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from polytempo.cache.layout import Segment
from polytempo.cache.pool import EntryPool
from polytempo.engine.row import Row
from polytempo.engine_config import EngineConfig
from polytempo.errors import CapacityError, InvariantError, RequestError


@dataclass(frozen=True)
class PlannedRow:
    """A row and its part of the next forward: tokens from position row.kv_len on, num_drafts drafts at their end."""

    row: Row
    segment: Segment
    num_drafts: int = 0

    @property
    def reaches_end(self) -> bool:
        """Whether the forward covers the row's last token, so that the next one can be sampled."""
        return self.segment.end - self.num_drafts == self.row.num_tokens

    @property
    def drafts(self) -> Sequence[int]:
        """The drafts at the segment's end."""
        return self.segment.token_ids[len(self.segment.token_ids) - self.num_drafts :]


def refuse_overflow(num_unfinished: int, num_new: int, config: EngineConfig) -> None:
    """Keep the queue bounded.

    Args:
        num_unfinished: rows that run or wait already.
        num_new: rows that would join them, all or none.
        config: gives max_rows and queue_limit.

    Raises:
        CapacityError: more than queue_limit rows would wait.
        RequestError: so they would if nothing else ran.
    """
    if config.queue_limit is None:
        return
    most = config.max_rows + config.queue_limit
    if num_new > most:
        raise RequestError(
            f"n: {num_new} outputs at once never fit; max_rows ({config.max_rows}) + queue_limit "
            f"({config.queue_limit}) is {most}",
            param="n",
        )
    if num_unfinished + num_new > most:
        raise CapacityError(
            f"{num_new} more rows beside {num_unfinished} unfinished ones exceed max_rows ({config.max_rows}) + "
            f"queue_limit ({config.queue_limit}); try again later, or raise queue_limit"
        )


class Scheduler:
    """First come, first served among equal priorities: rows wait for a slot, then run until they finish.

    A step feeds every decoding row its last token, then its drafts, then fills what is left of the token budget with
    prompt chunks in order of admission. Drafts that find no room are dropped: they cost nothing but themselves.

    When the pool has no block left for a decoding row's next token, the youngest row of the least urgent priority is
    set back: it gives up slot and state, waits in front of its equals, and is computed again later, to the same tokens.
    """

    def __init__(self, config: EngineConfig, pool: EntryPool | None = None) -> None:
        self.config = config
        self.pool = pool
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        self._free_slots = list(range(config.max_rows))
        # A copied row of `left_aligned` would need the columns of the row that it was copied from.
        self.shares_prompts = config.kv_layout == "ring"

    @property
    def has_work(self) -> bool:
        """Whether any row waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def num_free_slots(self) -> int:
        """Slots that no row holds."""
        return len(self._free_slots)

    def add(self, row: Row) -> None:
        """Queue a row behind those of its priority."""
        bisect.insort_right(self.waiting, row, key=lambda one: one.request.priority)

    def admit(self) -> list[Row]:
        """Seat waiting rows while there are slots, and blocks for the tokens they have; returns whom it seated."""
        admitted = []
        # Rows that still read their prompt will take more blocks than they hold.
        wanted = {row.slot: row.num_tokens for row in self.running}
        while self.waiting and self._free_slots:
            wanted[self._free_slots[0]] = self.waiting[0].num_tokens
            if self.pool is not None and self.running and not self.pool.fits(wanted):
                break
            row = self.waiting.pop(0)
            row.slot = heapq.heappop(self._free_slots)
            self.running.append(row)
            admitted.append(row)
        return admitted

    def _set_back_one(self) -> None:
        """Let the youngest row of the least urgent priority start over, later."""
        place = max(range(len(self.running)), key=lambda place: (self.running[place].request.priority, place))
        row = self.running.pop(place)
        self._free(row)
        row.kv_len, row.mtp_len, row.drafts = 0, 0, []
        row.num_set_back += 1
        bisect.insort_left(self.waiting, row, key=lambda one: one.request.priority)

    def _free(self, row: Row) -> None:
        heapq.heappush(self._free_slots, row.slot)
        if self.pool is not None:
            self.pool.release(row.slot)
        row.slot = None

    def release_finished(self) -> list[Row]:
        """Take finished rows out, wherever they are, and free their slots; returns them."""
        finished = [row for row in (*self.running, *self.waiting) if row.is_finished]
        for row in finished:
            if row.slot is not None:
                self._free(row)
        self.running = [row for row in self.running if not row.is_finished]
        self.waiting = [row for row in self.waiting if not row.is_finished]
        return finished

    def plan(self) -> list[PlannedRow]:
        """Choose the next forward's segments, in order of slot, and reserve their blocks; sets rows back if it must."""
        decoding = self._decoding_with_room()
        budget = self.config.max_step_tokens - len(decoding)
        planned = []
        for row in decoding:
            num_drafts = min(len(row.drafts), budget)
            if num_drafts:
                num_drafts = self._room(row, 1 + num_drafts) - 1
            planned.append(self._planned(row, 1, row.drafts[:num_drafts]))
            budget -= num_drafts
        if decoding and self.config.mixed_prompt_tokens is not None:
            budget = min(budget, self.config.mixed_prompt_tokens)
        for row in self.reading():
            if budget > 0:
                count = self._room(row, min(row.num_tokens - row.kv_len, self.config.max_chunk, budget))
                if count:
                    planned.append(self._planned(row, count))
                    budget -= count
        if self.running and not planned:
            # Prompts block one another; one row alone always finds room.
            self._set_back_one()
            return self.plan()
        return sorted(planned, key=lambda item: item.segment.slot)

    def reading(self) -> list[Row]:
        """Seated rows that are not decoding, in order of admission, without those that wait for another choice.

        Of the choices of one request the first reads the prompt; the others take its state (`engine.share`). Which one
        that is follows from who is seated, so nobody waits for a row that was set back or has ended.
        """
        readers: set[int] = set()
        rows = []
        for row in self.running:
            if row.is_decoding:
                continue
            if row.is_reading_prompt and self.shares_prompts:
                if id(row.request) in readers:
                    continue
                readers.add(id(row.request))
            rows.append(row)
        return rows

    def _decoding_with_room(self) -> list[Row]:
        """Decoding rows, with blocks for their last token."""
        while True:
            decoding = [row for row in self.running if row.is_decoding]
            growing = [] if self.pool is None else [r for r in decoding if not self.pool.holds(r.slot, r.kv_len + 1)]
            if not growing or self.pool.fits({row.slot: row.kv_len + 1 for row in growing}):
                break
            self._set_back_one()
        for row in growing:
            self._room(row, 1)
        return decoding

    def _room(self, row: Row, count: int) -> int:
        """The most tokens up to count that the row can feed; their blocks are reserved."""
        if self.pool is None or self.pool.holds(row.slot, row.kv_len + count):
            return count
        end = self.pool.most_tokens(row.slot, row.kv_len + count)
        self.pool.reserve(row.slot, end)
        return max(0, end - row.kv_len)

    def _planned(self, row: Row, count: int, drafts: Sequence[int] = ()) -> PlannedRow:
        token_ids = [*row.tokens(row.kv_len, row.kv_len + count), *drafts]
        return PlannedRow(row, Segment(row.slot, row.kv_len, token_ids), len(drafts))

    def check(self) -> None:
        """Raise InvariantError unless every slot is held by exactly one running row or free."""
        held = [row.slot for row in self.running]
        if sorted(held + self._free_slots) != list(range(self.config.max_rows)):
            raise InvariantError(
                f"slots held {sorted(held)} and free {sorted(self._free_slots)} are not 0..{self.config.max_rows - 1}"
            )
        for row in self.running:
            row.check()
        if self.pool is not None:
            self.pool.check()
