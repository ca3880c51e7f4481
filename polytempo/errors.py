"""Every error that polytempo raises on purpose; each message names who, the value, the limit and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PolytempoError(Exception):
    """Base of all errors below."""


class ConfigError(PolytempoError, ValueError):
    """An option or a config.json field is unknown, missing or out of range."""


class CheckpointError(PolytempoError, ValueError):
    """A checkpoint's files do not hold what its config promises; the message names file and tensor."""


class RequestError(PolytempoError, ValueError):
    """One request cannot be served; its neighbours are unaffected.

    Attributes:
        param: the option or field that is refused, None if the message names none.
        code: a word for programs, for example "context_length_exceeded", or None.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class CapacityError(PolytempoError, RuntimeError):
    """There is no room left for a row, a position or an entry."""


class EngineDeadError(PolytempoError, RuntimeError):
    """A step raised or hung, so the engine's state cannot be trusted any more; it serves nothing from then on."""


class InvariantError(PolytempoError, RuntimeError):
    """Our own bug: a promise between two parts of polytempo was broken."""


def unknown_option(kind: str, name: str, known: Iterable[str]) -> str:
    """Say that `name` is not among `known`, and suggest the nearest that is.

    Args:
        kind: what `name` is, for example "SamplingParams option".
        name: the unknown name.
        known: every name that would have been right.

    Returns:
        One sentence for an error message.
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown {kind} {name!r}; {hint}"
