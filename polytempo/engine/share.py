"""One reading of a prompt for all choices of a request: when the first has read it, the others take its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polytempo.cache.fork import SlotCopy, copy_slot, paste_slot
from polytempo.cache.store import RowStore
from polytempo.engine.row import Request, Row
from polytempo.engine.scheduler import PlannedRow, Scheduler


@dataclass(frozen=True)
class _ReadPrompt:
    """State of a request after all prompt tokens but the last, and how far it has keys of the MTP block."""

    request: Request
    state: SlotCopy
    mtp_len: int


class PromptSharing:
    """Hands the state of a prompt that one choice has read to the other choices of its request.

    A choice takes it up before the prompt's last token, which it feeds itself: logits are sampled per row. The one that
    read the prompt may be up to a chunk further; going on from there is the rewind of rejected drafts.

    Choices that have no seat yet find a copy when they get one. It lies beside `EngineConfig.memory`, one row's state
    for each request of which some choices have been seated and others have not.

    Attributes:
        num_rows: choices that took another's state.
        num_tokens: prompt tokens that they did not compute.
    """

    def __init__(self, store: RowStore, scheduler: Scheduler) -> None:
        """Begin with no copy.

        Args:
            store: all rows' state, of layout `ring`.
            scheduler: who runs and waits.
        """
        self.store, self.scheduler = store, scheduler
        self.num_rows = self.num_tokens = 0
        # By id(request), which is held: one that was aborted may be followed by another of the same name.
        self._kept: dict[int, _ReadPrompt] = {}

    @property
    def num_kept(self) -> int:
        """Copies that wait for choices without a seat."""
        return len(self._kept)

    def seat(self, row: Row) -> bool:
        """Start a newly seated row, in its cleared slot, from its request's copy; False if there is none."""
        prompt = self._kept.get(id(row.request))
        return prompt is not None and self._give(prompt, row)

    def hand_over(self, planned: Sequence[PlannedRow]) -> None:
        """After a step: rows that have read their prompt in it share it. Called before finished rows are released."""
        for item in planned:
            row, last = item.row, len(item.row.request.prompt_token_ids) - 1
            has_read = item.segment.start < last <= item.segment.end  # in this step; no drafts, then
            if has_read and row.request.params.n > 1 and row.error is None:
                self._share(row, last)

    def drop_unwanted(self) -> None:
        """Forget the copies that no waiting row will take."""
        if self._kept:
            wanted = {id(row.request) for row in self.scheduler.waiting if not row.is_finished}
            self._kept = {key: prompt for key, prompt in self._kept.items() if key in wanted}

    def _share(self, reader: Row, num_tokens: int) -> None:
        takers = [row for row in (*self.scheduler.running, *self.scheduler.waiting)
                  if row.request is reader.request and row.is_reading_prompt and not row.is_finished]  # fmt: skip
        if not takers:
            return
        # A reader that ended with its first token made no keys for its last chunk: followers count on none before it.
        mtp_len = num_tokens if reader.is_finished else min(reader.mtp_len, num_tokens)
        prompt = _ReadPrompt(reader.request, copy_slot(self.store, reader.slot, num_tokens), mtp_len)
        for row in takers:
            if row.slot is None:
                self._kept[id(row.request)] = prompt
            else:
                self._give(prompt, row)

    def _give(self, prompt: _ReadPrompt, row: Row) -> bool:
        """False if the row finds no blocks for it now: then it reads the prompt itself."""
        num_tokens = prompt.state.num_tokens
        if not self.store.pool.fits({row.slot: num_tokens}):
            return False
        paste_slot(self.store, row.slot, prompt.state)
        self.num_rows += 1
        self.num_tokens += num_tokens - row.kv_len
        row.kv_len, row.mtp_len = num_tokens, prompt.mtp_len
        return True
