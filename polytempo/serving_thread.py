"""The one thread that owns the engine and its device: takes commands between steps, reports what rows gained."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from polytempo.engine.engine import Engine
from polytempo.engine.row import Row
from polytempo.errors import EngineDeadError
from polytempo.types import FinishReason, Logprob


@dataclass(frozen=True)
class RequestDelta:
    """What one choice gained in one step.

    Attributes:
        index: which choice; with several prompts, prompt number · n + choice.
        text: text that became certain, never part of a stop string; may be empty.
        token_ids: committed tokens; may be empty when the choice ends otherwise.
        logprobs: one dict per token, or None if they were not asked for.
        finish_reason: None while it runs; a choice's last delta carries it.
        stop_reason: the stop string or id that ended it.
        error: why it failed or was given up.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass
class RowCursor:
    """A row, and how much of it was reported."""

    row: Row
    index: int
    num_chars: int = 0
    num_tokens: int = 0
    is_done: bool = False

    def take(self) -> RequestDelta | None:
        """What is new since the last call; None if nothing is."""
        row = self.row
        if self.is_done or (len(row.output_token_ids) == self.num_tokens and not row.is_finished):
            return None
        text = "" if row.text is None else row.text.text
        first, self.num_tokens = self.num_tokens, len(row.output_token_ids)
        delta = RequestDelta(
            index=self.index,
            text=text[self.num_chars :],
            token_ids=row.output_token_ids[first:],
            logprobs=None if row.request.params.logprobs is None else row.logprobs[first:],
            finish_reason=row.finish_reason,
            stop_reason=row.stop_reason,
            error=row.error,
        )
        self.num_chars, self.is_done = len(text), row.is_finished
        return delta


@dataclass(frozen=True)
class RowStatus:
    """One seated row, for people to look at."""

    slot: int
    request_id: str
    choice: int
    position: int
    num_prompt_tokens: int
    num_output_tokens: int
    is_decoding: bool
    tokens_per_step: float | None
    acceptance: float | None


@dataclass(frozen=True)
class EngineStatus:
    """The engine between two steps.

    Attributes:
        rows: seated rows in order of slot.
        num_waiting: rows without a seat.
        num_steps: target forwards so far.
        num_output_tokens: tokens reported so far.
        num_verifies: of finished rows, steps that fed a last token.
        num_drafted: of finished rows, drafts verified.
        num_accepted: of finished rows, drafts accepted.
    """

    rows: tuple[RowStatus, ...] = ()
    num_waiting: int = 0
    num_steps: int = 0
    num_output_tokens: int = 0
    num_verifies: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


def row_status(row: Row) -> RowStatus:
    """A row's numbers, frozen."""
    stats = row.stats
    return RowStatus(
        slot=-1 if row.slot is None else row.slot,
        request_id=row.request.request_id,
        choice=row.choice,
        position=row.num_tokens if row.is_decoding else row.kv_len,
        num_prompt_tokens=len(row.request.prompt_token_ids),
        num_output_tokens=len(row.output_token_ids),
        is_decoding=row.is_decoding,
        tokens_per_step=stats.mean_acceptance_length,
        acceptance=stats.acceptance_rate,
    )


@dataclass
class Tracked:
    """A submitted group of requests: whom to tell, and its rows."""

    owner: Any
    cursors: list[RowCursor] = field(default_factory=list)


Report = Callable[[list[tuple[Any, list[RequestDelta]]]], None]


class EngineThread:
    """Steps the engine while it has work.

    Attributes:
        status: replaced as a whole after every step and command; any thread may read it.
        step_started: when the step in progress began, seconds of the monotonic clock, or None.
    """

    def __init__(self, engine: Engine, report: Report, fail: Callable[[BaseException], None]) -> None:
        """Prepare; `start` starts.

        Args:
            engine: from now on touched by this thread alone.
            report: called in the thread after a step with (owner, deltas) pairs.
            fail: called in the thread, once, if a step raises; the thread ends.
        """
        self.status = EngineStatus()
        self.step_started: float | None = None
        self._engine, self._report, self._fail = engine, report, fail
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future] | None] = queue.SimpleQueue()
        self._tracked: list[Tracked] = []
        self._num_output_tokens = 0
        self._is_stopping = False
        # A daemon: a hung step cannot be interrupted, and must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="polytempo-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step in progress, whatever is still running."""
        self._is_stopping = True
        self._commands.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the end; returns whether it came."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def call(self, command: Callable[[], Any]) -> Future:
        """Run a command in the thread between two steps; its result or error comes through the future."""
        future: Future = Future()
        self._commands.put((command, future))
        return future

    def add(self, owner: Any, groups: Sequence[list[Row]]) -> None:
        """Queue the rows of several requests, and report their progress to `owner`."""
        rows = [row for group in groups for row in group]
        tracked = Tracked(owner, [RowCursor(row, index) for index, row in enumerate(rows)])

        def command() -> None:
            for group in groups:
                self._engine.add(group)
            self._tracked.append(tracked)

        self.call(command)

    def abort(self, owner: Any) -> Future:
        """End what is left of an owner's requests; nothing more is reported to it."""

        def command() -> None:
            for tracked in [one for one in self._tracked if one.owner is owner]:
                self._tracked.remove(tracked)
                for request_id in {cursor.row.request.request_id for cursor in tracked.cursors}:
                    self._engine.abort(request_id)

        return self.call(command)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._obey(wait=not self._engine.has_work)
                if self._engine.has_work and not self._is_stopping:
                    self.step_started = time.monotonic()
                    self._engine.step()
                    self.step_started = None
                    if self._is_stopping:  # the step outlived the patience of whoever watches
                        break
                    self._report_progress()
                self.status = self._look()
        except BaseException as error:  # noqa: B036 - whatever ends this thread must end its requests
            self._fail(error)
        finally:
            self.step_started = None
            self._is_stopping = True
            self._refuse_commands()

    def _obey(self, wait: bool) -> None:
        while not self._is_stopping:
            try:
                item = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if item is None:
                return
            command, future = item
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

    def _refuse_commands(self) -> None:
        while True:
            try:
                item = self._commands.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[1].set_exception(EngineDeadError("the engine has stopped"))

    def _report_progress(self) -> None:
        news = []
        for tracked in list(self._tracked):
            deltas = [delta for delta in (cursor.take() for cursor in tracked.cursors) if delta is not None]
            if deltas:
                news.append((tracked.owner, deltas))
                self._num_output_tokens += sum(len(delta.token_ids) for delta in deltas)
            if all(cursor.is_done for cursor in tracked.cursors):
                self._tracked.remove(tracked)
        if news:
            self._report(news)

    def _look(self) -> EngineStatus:
        scheduler, stats = self._engine.scheduler, self._engine.stats
        return EngineStatus(
            rows=tuple(row_status(row) for row in sorted(scheduler.running, key=lambda row: row.slot)),
            num_waiting=len(scheduler.waiting),
            num_steps=self._engine.num_steps,
            num_output_tokens=self._num_output_tokens,
            num_verifies=stats.num_verifies,
            num_drafted=stats.num_drafted,
            num_accepted=stats.num_accepted,
        )
