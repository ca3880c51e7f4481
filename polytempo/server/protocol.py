"""What clients may send: every field by name and type; anything else is refused with the name of the field.

Values are checked by `SamplingParams`, which the Python API shares; this module only says where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from polytempo.errors import RequestError
from polytempo.types import SamplingParams

MOST_LOGPROBS = 20
_MOST_DIGITS = 18  # of a token id; Python refuses to read numbers of thousands


class _Body(BaseModel):
    # Strict: "5" is not 5 and true is not 1, as in the Python API.
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """`stream_options`."""

    include_usage: bool = False


class JsonSchema(_Body):
    """`response_format.json_schema`; the schema is enforced whatever `strict` says."""

    name: str
    json_schema: dict[str, Any] | bool = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def options(self) -> dict[str, Any]:
        """The option of SamplingParams that it means."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError(
                f"response_format of type {self.type!r} {'needs' if self.json_schema is None else 'takes no'} "
                "json_schema",
                param="response_format",
            )
        if self.type == "json_schema":
            return {"json_schema": self.json_schema.json_schema}
        return {"json_object": True} if self.type == "json_object" else {}


class _Generation(_Body):
    """What both generating routes take. None means the default of SamplingParams, as if left out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=256)
    priority: int | None = None
    timeout: float | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    draft_len: int | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    grammar: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> dict[str, Any]:
        """Options of SamplingParams that were given.

        Raises:
            RequestError: a field is refused; its name is in `param`.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is for stream: true", param="stream_options")
        if self.timeout is not None and not 0 < self.timeout < float("inf"):
            raise RequestError(f"timeout={self.timeout} is refused; timeout must be seconds > 0", param="timeout")
        options = {name: getattr(self, name) for name in _SAMPLING_FIELDS if getattr(self, name) is not None}
        # Not the 16 of the Python API: a client that gives no limit wants the answer.
        options.setdefault("max_tokens", None)
        if self.logit_bias is not None:
            options["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        if self.response_format is not None:
            options |= self.response_format.options()
        return options


_SAMPLING_FIELDS = sorted(
    set(_Generation.model_fields)
    - {"model", "stream", "stream_options", "user", "priority", "timeout", "logit_bias", "response_format"}
)


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > _MOST_DIGITS:
        raise RequestError(f"logit_bias key {key!r:.40} is not a token id", param="logit_bias")
    return int(key)


def _refuse_too_many(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= MOST_LOGPROBS:
        raise RequestError(f"{name}={value} is refused; {name} must be in [0, {MOST_LOGPROBS}]", param=name)


Text = Annotated[str, Field(strict=True)]


class CompletionRequest(_Generation):
    """POST /v1/completions."""

    prompt: Text | list[Text] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def prompts(self) -> list[str | dict[str, list[int]]]:
        """Each prompt as LLM takes it.

        Raises:
            RequestError: there is none.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise RequestError("prompt is an empty list; it needs at least one prompt or token id", param="prompt")
        if isinstance(prompt[0], int):
            return [{"prompt_token_ids": prompt}]
        return [one if isinstance(one, str) else {"prompt_token_ids": one} for one in prompt]

    @property
    def is_scoring(self) -> bool:
        """Whether the prompt alone is wanted: echo with max_tokens 0."""
        return bool(self.echo) and self.max_tokens == 0

    def params(self) -> SamplingParams:
        """How to sample.

        Raises:
            RequestError: a field is refused; its name is in `param`.
        """
        _refuse_too_many("logprobs", self.logprobs)
        options = self.sampling()
        if self.is_scoring:
            options["max_tokens"] = 1  # a forward over the whole prompt yields a token anyway; it is dropped
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
            if self.echo:
                options["prompt_logprobs"] = self.logprobs
        return SamplingParams(**options)


class TextPart(_Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One message of a chat."""

    role: str = Field(min_length=1)
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def conversation(self) -> list[dict[str, str]]:
        """The messages as chat templates take them."""
        return [message.plain() for message in self.messages]

    def params(self) -> SamplingParams:
        """How to sample.

        Raises:
            RequestError: a field is refused; its name is in `param`.
        """
        options = self.sampling()
        if self.max_completion_tokens is not None:
            if self.max_tokens is not None:
                raise RequestError("max_completion_tokens and max_tokens mean the same; give one",
                                   param="max_completion_tokens")  # fmt: skip
            options["max_tokens"] = self.max_completion_tokens
        _refuse_too_many("top_logprobs", self.top_logprobs)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is for logprobs: true", param="top_logprobs")
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        return SamplingParams(**options)


class TokenizeRequest(_Body):
    """POST /tokenize: a prompt, or messages."""

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    tokens: list[int]
    skip_special_tokens: bool = False


def field_name(location: Sequence[str | int], fields: Mapping[str, Any]) -> str:
    """The field of a pydantic error's location, in OpenAI's spelling.

    Args:
        location: keys and indexes; for unions also names of types, which are no part of the body.
        fields: fields of the outermost model.

    Returns:
        For example "messages[0].content"; "" for the body as a whole.
    """
    name = ""
    for depth, part in enumerate(location):
        if isinstance(part, int):
            name += f"[{part}]"
        elif depth == 0 or (part.isidentifier() and part not in _UNION_PARTS and part not in fields):
            name += f".{part}" if name else part
    return name


_UNION_PARTS = ("str", "int", "list", "bool", "dict", "TextPart")
