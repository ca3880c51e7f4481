"""Runs one generating request: submit, then answer whole or as server-sent events, and stop when the client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from polytempo.async_llm import RequestStream
from polytempo.server.answers import merged, usage
from polytempo.server.failures import Failure, failure_of
from polytempo.server.kinds import Kind
from polytempo.server.metrics import Metrics
from polytempo.serving_thread import RequestDelta
from polytempo.types import FinishReason

logger = logging.getLogger("polytempo.server")
Result = TypeVar("Result")
CLIENT_LEFT = 499


class ClientLeft(Exception):
    """The client closed its connection before the answer was out."""


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """Wait for work, but no longer than the client does.

    Args:
        receive: of a request whose body has been read.
        work: cancelled when the client leaves.

    Returns:
        What the work returns.

    Raises:
        ClientLeft: the client left first.
    """
    leaving, working = asyncio.ensure_future(_disconnected(receive)), asyncio.ensure_future(work)
    try:
        await asyncio.wait({leaving, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        for task in (leaving, working):
            task.cancel()
        await asyncio.gather(leaving, working, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events; the body ends when the events end or the client leaves, whether or not anything is sent."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], on_leave: Any) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._on_leave = events, on_leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await while_connected(receive, self._send_events(send))
        except (ClientLeft, OSError):
            self._on_leave()

    async def _send_events(self, send: Send) -> None:
        async for event in self._events:
            await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Generation:
    """One request of either kind, from its parsed body to its last byte and its line in the log."""

    def __init__(self, kind: Kind, http_request: Request, request_id: str, metrics: Metrics) -> None:
        self.kind, self.http_request, self.metrics = kind, http_request, metrics
        self.request_id = request_id
        self.created = int(time.time())
        self.model = http_request.app.state.settings.model_name
        self.stream: RequestStream | None = None
        self._is_recorded = False

    async def respond(self) -> Response:
        """Submit and answer; nothing is sent before the request has been accepted.

        Raises:
            PolytempoError: the request was not accepted, or its engine died.
            Failure: one of its choices failed.
        """
        body, kind = self.kind.body, self.kind
        submit = kind.front.submit(kind.prompts, kind.params, body.priority or 0, body.timeout)
        try:
            self.stream = await while_connected(self.http_request.receive, submit)
            if body.stream:
                return EventStream(self._events(), lambda: self._record(CLIENT_LEFT))
            answer = await while_connected(self.http_request.receive, self._whole())
        except ClientLeft:
            self._record(CLIENT_LEFT)
            return Response(status_code=CLIENT_LEFT)
        except BaseException as error:
            self._record(failure_of(error).status)
            raise
        self._record(200)
        return JSONResponse(answer)

    async def _whole(self) -> dict[str, Any]:
        deltas: dict[int, list[RequestDelta]] = {index: [] for index in range(len(self.stream.rows))}
        async for delta in self.stream:
            self._refuse_failed(delta)
            deltas[delta.index].append(delta)
        choices = [self.kind.choice(self.stream, merged(parts), True) for parts in deltas.values()]
        return self._envelope(self.kind.object_name, choices) | {
            "usage": usage(self.stream.groups, self.kind.drops_output)
        }

    async def _events(self) -> AsyncIterator[str]:
        status = CLIENT_LEFT
        try:
            async for event in self._chunks():
                yield json.dumps(event, ensure_ascii=False)
            status = 200
            yield "[DONE]"
        except Exception as error:
            failure = failure_of(error, self.kind.prompt_field)
            status = failure.status
            yield json.dumps(failure.to_dict(), ensure_ascii=False)
        finally:
            self._record(status)

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        name, has_begun = self.kind.chunk_name, set()
        # With usage asked for, every other chunk says that it is not the one that has it.
        extra = {"usage": None} if self.kind.body.include_usage else {}
        async for delta in self.stream:
            self._refuse_failed(delta)
            is_first = delta.index not in has_begun
            opening = self.kind.opening(self.stream, delta.index) if is_first else None
            has_begun.add(delta.index)
            if opening is not None:
                yield self._envelope(name, [opening]) | extra
            yield self._envelope(name, [self.kind.chunk(self.stream, delta, is_first)]) | extra
        if self.kind.body.include_usage:
            yield self._envelope(name, []) | {"usage": usage(self.stream.groups, self.kind.drops_output)}

    def _envelope(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.kind.id_prefix}-{self.request_id}",
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _refuse_failed(self, delta: RequestDelta) -> None:
        if delta.finish_reason is FinishReason.ERROR:
            raise Failure(500, f"choice {delta.index} failed at {delta.error}", "server_error", code="request_failed")
        if delta.finish_reason is FinishReason.ABORT:
            raise Failure(504, f"choice {delta.index}: {delta.error}", "timeout", code="deadline")

    def _record(self, status: int) -> None:
        """Free the seats, count, and log one line; once."""
        if self._is_recorded:
            return
        self._is_recorded = True
        settings, num_prompt, num_output = self.http_request.app.state.settings, 0, 0
        if self.stream is not None:
            self.stream.close()
            self.metrics.record(self.stream)
            num_prompt = sum(len(group[0].request.prompt_token_ids) for group in self.stream.groups)
            num_output = sum(len(row.output_token_ids) for row in self.stream.rows)
        seconds = time.monotonic() - self.http_request.state.started
        user = f" user={self.kind.body.user!r}" if self.kind.body.user is not None else ""
        prompts = f" prompts={self.kind.prompts!r}" if settings.logs_prompts else ""
        logger.info(
            "request_id=%s path=%s status=%d prompt_tokens=%d output_tokens=%d seconds=%.3f%s%s",
            self.request_id, self.http_request.url.path, status, num_prompt, num_output, seconds, user, prompts,
        )  # fmt: skip
