"""Errors in OpenAI's form: every refusal says which field, and never repeats a NaN that JSON cannot hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse

from polytempo.errors import CapacityError, EngineDeadError, PolytempoError, RequestError
from polytempo.server.protocol import field_name

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True)
class Failure(Exception):
    """One refusal or failure.

    Attributes:
        status: HTTP status.
        message: for people.
        kind: OpenAI's `type`.
        param: the field, or None.
        code: a word for programs, or None.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's error body."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The error as a response of its own."""
        return JSONResponse(self.to_dict(), self.status, dict(headers or {}))


def failure_of(error: BaseException, prompt_field: str = "prompt") -> Failure:
    """What a client is told of an error.

    Args:
        error: what was raised.
        prompt_field: what this route calls the prompt.

    Returns:
        The failure; errors that are not the package's own keep their text out of it.
    """
    if isinstance(error, Failure):
        return error
    if isinstance(error, RequestError):
        param = prompt_field if error.param == "prompt" else error.param
        return Failure(400, str(error), param=param, code=error.code)
    if isinstance(error, CapacityError):
        return Failure(429, str(error), "rate_limit_error", code="queue_full")
    if isinstance(error, EngineDeadError):
        return Failure(503, str(error), "server_error", code="engine_dead")
    if isinstance(error, PolytempoError):
        return Failure(500, str(error), "server_error")
    return Failure(500, f"internal error ({type(error).__name__}); the server's log has more", "server_error")


def parse(data: bytes, model: type[Body]) -> Body:
    """A request body as its model.

    Args:
        data: the body.
        model: what it must be.

    Raises:
        Failure: 400; it is not JSON, or a field is unknown, missing or of the wrong type.
    """
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise Failure(400, f"the body is not valid JSON: {reason}") from None
    if not isinstance(value, dict):
        raise Failure(400, f"the body must be a JSON object, not {type(value).__name__}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _first_fault(error, model) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _first_fault(error: ValidationError, model: type[BaseModel]) -> Failure:
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    # An unknown field is the likeliest mistake and the clearest message.
    fault = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
    name = field_name(fault["loc"], model.model_fields)
    if fault["type"] == "extra_forbidden":
        return Failure(400, f"{name} is not a field that this server knows or supports", param=name, code="unknown_field")
    if fault["type"] == "missing":
        return Failure(400, f"{name} is required", param=name)
    return Failure(400, f"{name}: {fault['msg']}", param=name or None)
