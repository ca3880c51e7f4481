"""The ASGI application: routes, and what surrounds every request (ids, key, size, errors, counting)."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polytempo import __version__
from polytempo.async_llm import AsyncLLM
from polytempo.errors import EngineDeadError, RequestError
from polytempo.server.failures import Failure, failure_of, parse
from polytempo.server.generation import CLIENT_LEFT, Generation
from polytempo.server.kinds import Chat, Completion, Kind
from polytempo.server.metrics import Metrics
from polytempo.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

logger = logging.getLogger("polytempo.server")
PAGE = Path(__file__).parent / "page.html"
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_OPEN_PATHS = ("/health", "/")


@dataclass(frozen=True)
class ServerSettings:
    """How to serve.

    Attributes:
        model_name: what clients call the model.
        api_key: what clients must send as a bearer token, None for nothing.
        max_body_bytes: largest request body.
        allowed_origins: origins of web pages that may call the server from a browser; none by default.
        logs_prompts: write prompts to the log.
        drain_timeout: seconds that running requests get to finish at shutdown.
    """

    model_name: str = "polytempo-demo"
    api_key: str | None = None
    max_body_bytes: int = 8 * 2**20
    allowed_origins: tuple[str, ...] = ()
    logs_prompts: bool = False
    drain_timeout: float = 30.0


def make_app(front: AsyncLLM, settings: ServerSettings) -> Starlette:
    """The application; it starts and ends `front` with itself.

    Args:
        front: not started yet.
        settings: how to serve.

    Returns:
        An ASGI app. `app.state.metrics` holds its metrics.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await front.start()
        try:
            yield
        finally:
            await front.close(settings.drain_timeout)

    routes = [
        Route("/", page),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", one_model),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/version", version),
        Route("/status", status),
    ]
    middleware = [Middleware(Surroundings)]
    if settings.allowed_origins:
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=list(settings.allowed_origins),
                                        allow_methods=["GET", "POST"], allow_headers=["*"]))  # fmt: skip
    app = Starlette(routes=routes, middleware=middleware, lifespan=lifespan,
                    exception_handlers={HTTPException: _http_error})  # fmt: skip
    app.state.front, app.state.settings, app.state.metrics = front, settings, Metrics(front)
    app.state.started = int(time.time())
    return app


class Surroundings:
    """Around every request: its id in the response, its key, one error form, one count."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        given = request.headers.get("x-request-id", "")
        request.state.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        request.state.started = time.monotonic()
        sent: list[int] = []

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent.append(message["status"])
                message["headers"].append((b"x-request-id", request.state.request_id.encode()))
            await send(message)

        try:
            _refuse_wrong_key(request)
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            sent.append(CLIENT_LEFT)
        except Exception as error:
            failure = failure_of(error)
            if failure.status == 500:
                logger.exception("request_id=%s path=%s", request.state.request_id, request.url.path)
            if sent:
                raise
            await failure.response(_headers(failure))(scope, receive, send_with_id)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            scope["app"].state.metrics.count_response(path, sent[0] if sent else CLIENT_LEFT)


def _headers(failure: Failure) -> dict[str, str]:
    if failure.status == 401:
        return {"www-authenticate": "Bearer"}
    return {"retry-after": "1"} if failure.status in (429, 503) else {}


def _refuse_wrong_key(request: Request) -> None:
    key = request.app.state.settings.api_key
    if key is None or request.url.path in _OPEN_PATHS:
        return
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
        raise Failure(401, "this server needs its API key: send 'Authorization: Bearer KEY'", "authentication_error",
                      code="invalid_api_key")  # fmt: skip


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Unknown paths and methods, in the same form as every other error."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    return Failure(error.status_code, message).response(error.headers)


async def _body(request: Request) -> bytes:
    """The request's body, if it is JSON and not too large.

    JSON must be declared: a web page cannot send that to a server on this machine without asking first.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Failure(415, f"content-type is {kind!r}; send 'Content-Type: application/json'")
    most, parts, size = request.app.state.settings.max_body_bytes, [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise Failure(413, f"the body is larger than {most} bytes")
        parts.append(part)
    return b"".join(parts)


async def _generate(request: Request, model: type, kind_of: Callable[..., Kind]) -> Response:
    body = parse(await _body(request), model)
    _refuse_other_model(request, body.model)
    prompt_field = "messages" if kind_of is Chat else "prompt"
    try:
        if request.app.state.front.llm.tokenizer is None:
            raise RequestError("serving needs a tokenizer, and the model has none")
        # It renders and tokenises a chat, which can take long enough to hold up every other stream.
        kind = await asyncio.to_thread(kind_of, body, request.app.state.front)
        return await Generation(kind, request, request.state.request_id, request.app.state.metrics).respond()
    except RequestError as error:
        raise failure_of(error, prompt_field) from None


def _refuse_other_model(request: Request, name: str | None) -> None:
    own = request.app.state.settings.model_name
    if name is not None and name != own:
        raise Failure(404, f"the model {name!r:.80} does not exist; this server has {own!r}", param="model",
                      code="model_not_found")  # fmt: skip


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    return await _generate(request, CompletionRequest, Completion)


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    return await _generate(request, ChatRequest, Chat)


def _model_object(request: Request) -> dict[str, object]:
    state = request.app.state
    limit = state.front.llm.engine.config.max_model_len
    return {"id": state.settings.model_name, "object": "model", "created": state.started, "owned_by": "polytempo",
            "max_model_len": limit}  # fmt: skip


async def models(request: Request) -> Response:
    """GET /v1/models."""
    return JSONResponse({"object": "list", "data": [_model_object(request)]})


async def one_model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    _refuse_other_model(request, request.path_params["model"])
    return JSONResponse(_model_object(request))


async def tokenize(request: Request) -> Response:
    """POST /tokenize: what a prompt or a chat costs."""
    body = parse(await _body(request), TokenizeRequest)
    llm = request.app.state.front.llm
    if (body.prompt is None) == (body.messages is None):
        raise Failure(400, "give either prompt or messages", param="prompt")
    if body.prompt is not None:
        tokens = await asyncio.to_thread(llm.tokenizer.encode, body.prompt, body.add_special_tokens)
    else:
        try:
            messages = [message.plain() for message in body.messages]
            render = llm.tokenizer.apply_chat_template
            tokens = await asyncio.to_thread(render, messages, body.add_generation_prompt)
        except RequestError as error:
            raise Failure(400, str(error), param="messages") from None
    return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": llm.engine.config.max_model_len})


async def detokenize(request: Request) -> Response:
    """POST /detokenize."""
    body = parse(await _body(request), DetokenizeRequest)
    llm = request.app.state.front.llm
    vocab_size = llm.model.config.vocab_size
    if wrong := [token_id for token_id in body.tokens if not 0 <= token_id < vocab_size]:
        raise Failure(400, f"tokens holds {wrong[0]}; ids are 0..{vocab_size - 1}", param="tokens")
    return JSONResponse({"prompt": llm.tokenizer.decode(body.tokens, body.skip_special_tokens)})


async def health(request: Request) -> Response:
    """GET /health: 200 if the engine's thread answers, 503 if it is dead, hung or shutting down."""
    front = request.app.state.front
    await front.ping()
    if front.is_draining:
        raise EngineDeadError("the server is shutting down")
    return JSONResponse({"status": "ok"})


async def metrics(request: Request) -> Response:
    """GET /metrics: Prometheus."""
    return Response(request.app.state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def version(request: Request) -> Response:
    """GET /version."""
    return JSONResponse({"version": __version__})


async def page(request: Request) -> Response:
    """GET /: a page that shows the rows and lets one try a prompt."""
    return HTMLResponse(PAGE.read_text(encoding="utf-8"))


async def status(request: Request) -> Response:
    """GET /status: the engine's numbers for the page."""
    state, front = request.app.state, request.app.state.front
    config = front.llm.engine.config
    return JSONResponse(
        asdict(front.status)
        | {
            "model": state.settings.model_name,
            "version": __version__,
            "failure": None if front.failure is None else str(front.failure),
            "max_rows": config.max_rows,
            "max_model_len": config.max_model_len,
            "num_unfinished_rows": front.num_unfinished_rows,
            "peak_resident_bytes": _peak_resident_bytes(),
            "seconds": time.monotonic(),
        }
    )


def _peak_resident_bytes() -> int | None:
    """Most memory that the process has held in RAM, None where the system does not say."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
