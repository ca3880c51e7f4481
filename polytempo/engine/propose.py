"""Who proposes drafts: the MTP block, a script, or nobody. Whatever they propose, the target's tokens are emitted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from polytempo.cache.layout import Segment
from polytempo.cache.streams import keep_spans
from polytempo.device import to_device
from polytempo.engine.draw import sampling_position
from polytempo.engine.row import Row
from polytempo.engine.sampling import NO_TOKEN, sample
from polytempo.engine.target import Target
from polytempo.model.forward import mtp_catch_up


@dataclass(frozen=True)
class CaughtUp:
    """What a step left behind of one row, for the proposer.

    Attributes:
        row: not finished; its tokens are committed and its kv_len is set: to 0, below `start`, if it starts over.
        start: position of the first token that the row fed in this step.
        token_idx: place of that token among the step's packed tokens.
    """

    row: Row
    start: int
    token_idx: int


class Proposer(Protocol):
    """Fills `row.drafts` for the next step.

    Attributes:
        per_row_positions: whether it drafts for each row at that row's own position; without it, the engine advances
            rows by COHORT.
        can_draft: whether it ever does; if not, no step asks how many drafts pay.
        needs_streams: whether forwards without drafts are to keep their streams in the store for it.
        later_seconds: of the last drafts, seconds of each forward of the MTP block but the first.
    """

    per_row_positions: bool
    can_draft: bool
    needs_streams: bool
    later_seconds: Sequence[float]

    def propose(
        self, rows: Sequence[CaughtUp], streams: Tensor, draft_lens: Sequence[int], are_kept: bool
    ) -> None:
        """Catch up on committed positions, then draft.

        Args:
            rows: rows that took part in the step and go on.
            streams: [T, hc, D], the target's last-layer streams of the step's packed tokens.
            draft_lens: most drafts to make for each row; 0 for rows that are still in their prompt.
            are_kept: whether the forward, having no drafts, has kept these streams in the store.
        """

    def resume(self, row: Row, streams: Tensor) -> None:
        """Take up a row whose state was restored up to kv_len; `streams` [1, hc, D] are of position kv_len − 1."""


class NoProposer:
    """Plain decoding."""

    per_row_positions = True
    can_draft = False
    needs_streams = False
    later_seconds = ()

    def propose(
        self, rows: Sequence[CaughtUp], streams: Tensor, draft_lens: Sequence[int], are_kept: bool
    ) -> None:
        """Leave every row without drafts."""

    def resume(self, row: Row, streams: Tensor) -> None:
        """Nothing to take up."""


class ScriptedProposer:
    """A test double and benchmark tool: drafts come from a function of the row.

    Args:
        script: (row, most drafts) -> token ids for positions num_tokens, num_tokens + 1, …
    """

    per_row_positions = True
    can_draft = True
    needs_streams = False
    later_seconds = ()

    def __init__(self, script: Callable[[Row, int], Sequence[int]]) -> None:
        self.script = script

    def propose(
        self, rows: Sequence[CaughtUp], streams: Tensor, draft_lens: Sequence[int], are_kept: bool
    ) -> None:
        """Ask the script."""
        for item, draft_len in zip(rows, draft_lens, strict=True):
            item.row.drafts = list(self.script(item.row, draft_len))[:draft_len] if draft_len else []

    def resume(self, row: Row, streams: Tensor) -> None:
        """A script has no state."""


class MTPProposer:
    """Drafts with the checkpoint's own MTP block.

    Its key at position p depends only on (streams of p, token of p + 1). So while a row does not draft, the streams of
    its last window are kept and nothing is computed; when it drafts, the keys it lacks are made from them, and the
    whole block runs once per draft for all rows together, each at its own position.

    A forward without drafts keeps its tokens' streams itself; of one with drafts, those of committed tokens are kept
    here, for a rejected draft's would take the cell of a position that is still in the window.

    Attributes:
        num_forwards: whole-block forwards so far.
        later_seconds: as `Proposer.later_seconds`; each forward ends with its tokens on the host.
    """

    per_row_positions = True
    can_draft = True
    needs_streams = True

    def __init__(self, target: Target) -> None:
        self.target = target
        self.num_forwards = 0
        self.later_seconds: list[float] = []
        # Rings of all slots end to end: a row's cell is slot · window + position mod window.
        self._kept = target.store.mtp_streams.flatten(0, 1)
        self._window = target.model.config.sliding_window

    def propose(
        self, rows: Sequence[CaughtUp], streams: Tensor, draft_lens: Sequence[int], are_kept: bool
    ) -> None:
        """As `Proposer.propose`, in the step's inference mode.

        The last committed pair of a drafting row goes through the whole block.
        """
        if are_kept and self.target.prefix_cache is None and not any(draft_lens):
            return  # what most steps of a pause come to: no row has drafts, none gets any
        for item in rows:
            item.row.drafts = []
        writing, waiting = [], []
        for item, draft_len in zip(rows, draft_lens, strict=True):
            (writing if draft_len or self._is_kept(item) else waiting).append((item, draft_len))
        chain = [(item, draft_len) for item, draft_len in writing if draft_len]
        written, token_idx, previous = self._missing_pairs(writing, streams)
        if waiting and not are_kept:
            spans = [(item.row.slot, item.start, item.row.kv_len, item.token_idx) for item, _ in waiting]
            keep_spans(self.target.store.mtp_streams, spans, streams)
        if written and not chain:
            self._catch_up(written, [], previous, token_idx)
        token_idx += [item.token_idx + item.row.kv_len - 1 - item.start for item, _ in chain]
        ended = []
        for depth in range(max(draft_lens, default=0)):
            chain, previous, token_idx = self._extend(chain, written, previous, token_idx, depth)
            written = []
            ended.append(time.perf_counter())
            if not chain:
                break
        self.later_seconds = [end - start for start, end in zip(ended[:-1], ended[1:], strict=True)]

    @torch.inference_mode()
    def resume(self, row: Row, streams: Tensor) -> None:
        """Write the key of the one pair that a snapshot could not hold, since its token comes after the boundary."""
        segment = Segment(row.slot, row.kv_len - 1, row.tokens(row.kv_len, row.kv_len + 1))
        self._catch_up([segment], [], streams)
        row.mtp_len = row.kv_len

    def _is_kept(self, item: CaughtUp) -> bool:
        """Whether a snapshot of the row is about to be taken, which needs its keys."""
        return self.target.prefix_cache is not None and self.target.prefix_cache.is_due(item.row, item.start)

    def _missing_pairs(
        self, rows: Sequence[tuple[CaughtUp, int]], streams: Tensor
    ) -> tuple[list[Segment], list[int], Tensor]:
        """Pairs of their last window whose keys rows lack, but for the last pair of a row that drafts.

        Returns:
            The pairs; which of the streams is each one's; the step's streams, with those that were kept behind them.
        """
        window = self._window
        segments, token_idx, cells = [], [], []
        for item, draft_len in rows:
            row = item.row
            start, end = max(row.mtp_len, item.start - window + 1), row.kv_len - (1 if draft_len else 0)
            row.mtp_len = row.kv_len
            if start >= end:
                continue
            segments.append(Segment(row.slot, start, row.tokens(start + 1, end + 1)))
            earlier = range(start, min(item.start, end))
            token_idx += range(len(streams) + len(cells), len(streams) + len(cells) + len(earlier))
            cells += [row.slot * window + position % window for position in earlier]
            now = max(start, item.start) - item.start
            token_idx += range(item.token_idx + now, item.token_idx + end - item.start)
        if cells:
            streams = torch.cat((streams, self._kept[to_device(cells, streams.device)]))
        return segments, token_idx, streams

    def _catch_up(
        self, written: Sequence[Segment], queried: Sequence[Segment], streams: Tensor,
        token_idx: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        target = self.target
        return mtp_catch_up(target.model, target.tables, target.store, written, queried, streams, token_idx)

    def _extend(
        self, chain: list[tuple[CaughtUp, int]], written: list[Segment], streams: Tensor,
        token_idx: Sequence[int] | None, depth: int,
    ) -> tuple[list[tuple[CaughtUp, int]], Tensor, list[int] | None]:  # fmt: skip
        """Add draft number depth + 1 to every row of the chain: one forward, per-row positions.

        Returns:
            The rows that want another, the block's output streams, and which of these are theirs.
        """
        segments = []
        for item, _ in chain:
            row = item.row
            newest = row.drafts[-1] if row.drafts else row.tokens(row.num_tokens - 1, row.num_tokens)[0]
            segments.append(Segment(row.slot, row.kv_len - 1 + depth, [newest]))
        output = self._catch_up(written, segments, streams, token_idx)
        self.num_forwards += 1
        positions = [sampling_position(item.row, item.row.drafts) for item, _ in chain]
        # The same noise as the target's: a draft is what the target would draw if their logits agreed.
        drawn = sample(self.target.model.mtp_logits(output), positions, self.target.sampling_ops).token_ids.tolist()
        kept = []
        for place, ((item, draft_len), token_id) in enumerate(zip(chain, drawn, strict=True)):
            if token_id != NO_TOKEN:
                item.row.drafts.append(token_id)
                if len(item.row.drafts) < draft_len:
                    kept.append(place)
        return [chain[place] for place in kept], output, None if len(kept) == len(chain) else kept
