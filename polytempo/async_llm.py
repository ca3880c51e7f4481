"""The asynchronous front: requests from any number of tasks, streams of deltas back, one thread that owns the device.

Everything here runs in the event loop; what touches the engine is a command to `EngineThread`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from polytempo.engine.outputs import request_output
from polytempo.engine.row import Row
from polytempo.engine.scheduler import refuse_overflow
from polytempo.errors import EngineDeadError, InvariantError
from polytempo.llm import LLM, Prompt
from polytempo.serving_thread import EngineStatus, EngineThread, RequestDelta
from polytempo.types import RequestOutput, SamplingParams

__all__ = ["AsyncLLM", "RequestDelta", "RequestStream"]
DEFAULT_STEP_TIMEOUT = 120.0


class RequestStream:
    """One submitted group of prompts while it runs: iterate over it for deltas.

    Attributes:
        groups: the rows of each prompt, one per choice.
        arrival: when it was submitted, seconds of the monotonic clock.
        first_token_at: when each row's first token was delivered, None before.
        finished_at: when each row's last delta was delivered, None before.
    """

    def __init__(self, front: AsyncLLM, groups: Sequence[list[Row]]) -> None:
        self.groups = groups
        self.rows = [row for group in groups for row in group]
        self.arrival = time.monotonic()
        self.first_token_at: list[float | None] = [None] * len(self.rows)
        self.finished_at: list[float | None] = [None] * len(self.rows)
        self.is_closed = False
        self._front = front
        self._news: asyncio.Queue[RequestDelta | EngineDeadError] = asyncio.Queue()
        self._num_running = len(self.rows)

    async def __aiter__(self) -> AsyncIterator[RequestDelta]:
        """Deltas of all choices until the last has finished.

        Raises:
            EngineDeadError: the engine died; no more will come.
        """
        while self._num_running:
            item = await self._news.get()
            if isinstance(item, EngineDeadError):
                raise item
            if item.finish_reason is not None:
                self._num_running -= 1
            yield item

    async def outputs(self) -> list[RequestOutput]:
        """Wait for the end; one output per prompt.

        Raises:
            EngineDeadError: the engine died first.
        """
        async for _ in self:
            pass
        return [request_output(group, self._front.llm.decode_token) for group in self.groups]

    def close(self) -> None:
        """Give the request up, if it still runs: its seats are free after the step in progress. May be called twice."""
        self._front.forget(self)

    def deliver(self, deltas: Sequence[RequestDelta]) -> None:
        """Queue what a step brought; called in the event loop by the front alone."""
        now = time.monotonic()
        for delta in deltas:
            if delta.token_ids and self.first_token_at[delta.index] is None:
                self.first_token_at[delta.index] = now
            if delta.finish_reason is not None:
                self.finished_at[delta.index] = now
            self._news.put_nowait(delta)
        if all(moment is not None for moment in self.finished_at):
            self._front.forget(self, aborts=False)

    def fail(self, error: EngineDeadError) -> None:
        """Queue the engine's death; called in the event loop by the front alone."""
        self._news.put_nowait(error)


class AsyncLLM:
    """Serves an LLM to asyncio tasks. From `start` on, nobody else may use the LLM's engine.

    Attributes:
        llm: model, tokenizer and limits; `EngineConfig.queue_limit` bounds the queue.
        failure: why the engine is dead, None while it lives.
        is_draining: whether new requests are refused since the end has begun.
    """

    def __init__(self, llm: LLM, step_timeout: float = DEFAULT_STEP_TIMEOUT) -> None:
        """Wrap; `start` starts.

        Args:
            llm: idle.
            step_timeout: seconds after which a step counts as hung and the engine as dead.
        """
        self.llm, self.step_timeout = llm, step_timeout
        self.failure: EngineDeadError | None = None
        self.is_draining = False
        self._streams: set[RequestStream] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watchdog: asyncio.Task | None = None
        self._thread = EngineThread(llm.engine, self._report, self._report_death)

    async def start(self) -> None:
        """Start the engine's thread; to be called in the event loop that will submit requests."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._watchdog = asyncio.create_task(self._watch())

    async def close(self, drain_timeout: float = 0.0) -> None:
        """End the thread.

        Args:
            drain_timeout: seconds that running requests are given to finish; new ones are refused meanwhile.
        """
        self.is_draining = True
        give_up = time.monotonic() + drain_timeout
        while self._streams and self.failure is None and time.monotonic() < give_up:
            await asyncio.sleep(0.02)
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._thread.stop()
        self._die(EngineDeadError("the engine was stopped"))
        await asyncio.to_thread(self._thread.join, min(5.0, self.step_timeout))

    @property
    def status(self) -> EngineStatus:
        """The engine after its latest step."""
        return self._thread.status

    @property
    def num_unfinished_rows(self) -> int:
        """Rows that were submitted and have not ended, queued ones included."""
        return sum(len(stream.rows) for stream in self._streams)

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> RequestStream:
        """Check prompts and queue all of them, or none.

        Args:
            prompts: at least one; their choices are numbered on.
            params: for all of them; None is SamplingParams().
            priority: of requests that wait for a seat, the lowest goes first.
            timeout: seconds after which a request that has not finished is given up.

        Returns:
            The running group; whoever loses interest calls its `close`.

        Raises:
            RequestError: a prompt or an option cannot be served.
            CapacityError: the queue is full.
            EngineDeadError: the engine is dead or draining.
        """
        self._refuse_if_dead()
        num_new, config = len(prompts) * (params or SamplingParams()).n, self.llm.engine.config
        refuse_overflow(self.num_unfinished_rows, num_new, config)
        # Tokenising a long prompt or compiling a grammar takes long enough to hold up every other stream.
        groups = [await asyncio.to_thread(self.llm.rows_of, prompt, params, priority, timeout) for prompt in prompts]
        if not groups:
            raise InvariantError("submit needs at least one prompt")
        self._refuse_if_dead()
        stream = RequestStream(self, groups)
        refuse_overflow(self.num_unfinished_rows, num_new, config)  # others came while this one was tokenised
        self._streams.add(stream)
        self._thread.add(stream, groups)
        return stream

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0, timeout: float | None = None
    ) -> AsyncIterator[RequestDelta]:
        """Complete one prompt, yielding what each step brings; leaving the loop early gives the request up.

        Args:
            prompt: text, token ids, or a dict, as for LLM.generate.
            params: None is SamplingParams().
            priority: as for `submit`.
            timeout: as for `submit`.

        Yields:
            Deltas of all n choices.

        Raises:
            RequestError: as for `submit`.
            CapacityError: as for `submit`.
            EngineDeadError: as for `submit`; also if the engine dies meanwhile.
        """
        stream = await self.submit([prompt], params, priority, timeout)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.close()

    async def ping(self) -> None:
        """Ask the engine's thread for a sign of life; it answers between two steps.

        Raises:
            EngineDeadError: it is dead, or hung for longer than step_timeout.
        """
        if self.failure is not None:
            raise self.failure
        answer = asyncio.wrap_future(self._thread.call(lambda: None))
        while not answer.done():
            await asyncio.wait([answer], timeout=0.05)
            if self.failure is not None:
                answer.cancel()
                raise self.failure
        answer.result()

    def forget(self, stream: RequestStream, aborts: bool = True) -> None:
        """Drop a stream from the books; `aborts` also ends what is left of it."""
        if stream in self._streams:
            self._streams.remove(stream)
            if aborts:
                self._thread.abort(stream)
        stream.is_closed = True

    def _refuse_if_dead(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.is_draining:
            raise EngineDeadError("the server is shutting down and takes no new requests")

    def _report(self, news: list[tuple[Any, list[RequestDelta]]]) -> None:
        """In the engine's thread: hand a step's deltas to the event loop, all at once."""
        self._to_loop(self._deliver, news)

    def _report_death(self, error: BaseException) -> None:
        """In the engine's thread: a step raised."""
        dead = EngineDeadError(f"the engine died: {type(error).__name__}: {error}")
        dead.__cause__ = error
        self._to_loop(self._die, dead)

    def _to_loop(self, callback: Any, argument: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:  # the loop has been closed: nobody is left to tell
            pass

    def _deliver(self, news: list[tuple[RequestStream, list[RequestDelta]]]) -> None:
        for stream, deltas in news:
            if not stream.is_closed:
                stream.deliver(deltas)

    def _die(self, error: EngineDeadError) -> None:
        """Fail everything that runs; the first reason stays."""
        if self.failure is None:
            self.failure = error
        for stream in list(self._streams):
            stream.fail(self.failure)
            self.forget(stream, aborts=False)

    async def _watch(self) -> None:
        """Declare the engine dead when a step takes too long; its thread ends if the step ever returns."""
        while self.failure is None:
            await asyncio.sleep(min(1.0, self.step_timeout / 4))
            started = self._thread.step_started
            if started is not None and time.monotonic() - started > self.step_timeout:
                self._thread.stop()
                self._die(EngineDeadError(f"the engine died: a step ran for more than {self.step_timeout:g} s"))
