"""Reads prompts from the command line and from files. Every refusal names the file and the line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polytempo.errors import RequestError, unknown_option

_KINDS = ("prompt", "prompt_token_ids", "messages")
_KEYS = (*_KINDS, "params")


@dataclass(frozen=True)
class PromptSource:
    """One prompt and where it was read.

    Attributes:
        where: for messages, for example "prompts.jsonl:3".
        kind: "prompt", "prompt_token_ids" or "messages".
        value: text, token ids or messages.
        params: options of its own, by field of SamplingParams.
    """

    where: str
    kind: str
    value: Any
    params: Mapping[str, Any] = field(default_factory=dict)


def read_prompts(texts: Sequence[str], file: str | None) -> list[PromptSource]:
    """Collect the prompts of --prompt, then those of --prompts-file.

    Args:
        texts: prompts given one by one.
        file: path, "-" for stdin, or None.

    Returns:
        At least one prompt.

    Raises:
        RequestError: there is none, the file cannot be read, or a line of it is malformed.
    """
    sources = [PromptSource(f"--prompt {place}", "prompt", text) for place, text in enumerate(texts, 1)]
    if file is not None:
        name, text = _read(file)
        found = _parse_jsonl(name, text) if _is_jsonl(file, text) else _parse_lines(name, text)
        if not found:
            raise RequestError(f"{name}: holds no prompt")
        sources += found
    if not sources:
        raise RequestError("no prompt; give --prompt TEXT or --prompts-file FILE ('-' reads stdin)")
    return sources


def _read(file: str) -> tuple[str, str]:
    name = "<stdin>" if file == "-" else file
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return name, data.decode("utf-8-sig")
    except OSError as error:
        raise RequestError(f"{name}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: is not UTF-8 (byte {error.start})") from None


def _is_jsonl(file: str, text: str) -> bool:
    """By the file's ending; of stdin and unknown endings, by the first character."""
    ending = Path(file).suffix.lower()
    if ending in (".txt", ".jsonl"):
        return ending == ".jsonl"
    return text.lstrip().startswith("{")


def _numbered(text: str) -> list[tuple[int, str]]:
    """Lines that are not blank, with their numbers; only newlines end a line."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _parse_lines(name: str, text: str) -> list[PromptSource]:
    return [PromptSource(f"{name}:{number}", "prompt", line) for number, line in _numbered(text)]


def _parse_jsonl(name: str, text: str) -> list[PromptSource]:
    return [_parse_object(f"{name}:{number}", line) for number, line in _numbered(text)]


def _parse_object(where: str, line: str) -> PromptSource:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(value, dict):
        raise RequestError(f"{where}: holds a {type(value).__name__}; each line must be a JSON object")
    for key in value:
        if key not in _KEYS:
            raise RequestError(f"{where}: {unknown_option('key', key, _KEYS)}")
    kinds = [kind for kind in _KINDS if kind in value]
    if len(kinds) != 1:
        found = " and ".join(map(repr, kinds)) or "none"
        raise RequestError(f"{where}: needs exactly one of {', '.join(map(repr, _KINDS))}; found {found}")
    kind = kinds[0]
    wanted = str if kind == "prompt" else list
    if not isinstance(value[kind], wanted):
        raise RequestError(f"{where}: {kind!r} must be a {wanted.__name__}, not {type(value[kind]).__name__}")
    params = value.get("params", {})
    if not isinstance(params, dict):
        raise RequestError(f"{where}: 'params' must be an object, not {type(params).__name__}")
    return PromptSource(where, kind, value[kind], _with_integer_keys(params))


def _with_integer_keys(params: dict[str, Any]) -> dict[str, Any]:
    """JSON objects have text keys: turn those of logit_bias back into token ids."""
    bias = params.get("logit_bias")
    if not isinstance(bias, dict):
        return params
    return {**params, "logit_bias": {int(key) if key.isdecimal() else key: value for key, value in bias.items()}}
