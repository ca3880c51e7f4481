"""Text to token ids and back: tokenizer.json, tokenizer_config.json and the chat template of a checkpoint.

Knows nothing of models, requests or streams; `engine.text` turns running outputs into text.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from polytempo.errors import CheckpointError, RequestError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"


class Tokenizer:
    """Encodes prompts, decodes outputs and renders chats.

    Attributes:
        bos_token_id: id that begins a sequence, or None.
        eos_token_id: id that ends one, or None.
        vocab_size: tokens including added ones; a model may pad its own vocabulary beyond that.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        add_bos_token: bool | None = None,
        chat_template: str | None = None,
    ):
        """Wrap a loaded tokenizer.

        Args:
            backend: the `tokenizers` object.
            bos_token: text of the token that begins a sequence.
            eos_token: text of the token that ends one.
            add_bos_token: whether `encode` puts BOS first; None leaves special tokens to the backend.
            chat_template: jinja2 source, or None.

        Raises:
            CheckpointError: a special token is not in the vocabulary, or the template does not parse.
        """
        # A tokenizer.json may carry the truncation and padding of its training; either would corrupt a prompt.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._add_bos_token = add_bos_token
        self.bos_token_id = self._special_id("bos_token", bos_token)
        self.eos_token_id = self._special_id("eos_token", eos_token)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._template = None if chat_template is None else _compile(chat_template)
        if add_bos_token and self.bos_token_id is None:
            raise CheckpointError(f"{CONFIG_FILE} says add_bos_token but names no bos_token")

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Load from a checkpoint directory.

        Args:
            path: holds tokenizer.json and tokenizer_config.json; a chat_template.jinja there takes precedence
                over the config's chat_template.

        Raises:
            CheckpointError: a file is missing or cannot be read, or names a token that does not exist.
        """
        folder = Path(path)
        try:
            backend = tokenizers.Tokenizer.from_str(_read(folder / TOKENIZER_FILE))
        except Exception as error:  # the library raises bare Exception for every kind of bad file
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{folder / TOKENIZER_FILE} is not a tokenizer: {error}") from error
        try:
            config = json.loads(_read(folder / CONFIG_FILE))
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{folder / CONFIG_FILE} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{folder / CONFIG_FILE} must hold a JSON object, not {type(config).__name__}")
        template_path = folder / TEMPLATE_FILE
        template = _read(template_path) if template_path.is_file() else _config_template(config)
        return cls(
            backend,
            bos_token=_token_text(config, "bos_token"),
            eos_token=_token_text(config, "eos_token"),
            add_bos_token=config.get("add_bos_token"),
            chat_template=template,
        )

    @classmethod
    def from_transformers(cls, hf_tokenizer: Any) -> Tokenizer:
        """Adapt a fast transformers tokenizer; its backend already holds the special-token rules.

        Raises:
            CheckpointError: it is a slow tokenizer, without a `tokenizers` backend.
        """
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise CheckpointError(
                f"{type(hf_tokenizer).__name__} has no `tokenizers` backend; load its fast version"
            )
        return cls(
            backend,
            bos_token=hf_tokenizer.bos_token,
            eos_token=hf_tokenizer.eos_token,
            chat_template=_default_template(hf_tokenizer.chat_template),
        )

    def _special_id(self, name: str, token: str | None) -> int | None:
        if token is None:
            return None
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise CheckpointError(f"{name} {token!r} is not in the vocabulary of {TOKENIZER_FILE}")
        return token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens`, whatever the checkpoint puts around a prompt."""
        if not isinstance(text, str):
            raise RequestError(f"prompt must be a string, not {type(text).__name__}")
        if self._add_bos_token is None or not add_special_tokens:
            return self._ids(text, add_special_tokens)
        ids = self._ids(text, False)
        return [self.bos_token_id, *ids] if self._add_bos_token else ids

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            # `encode` holds Python's lock: a text of 1 MiB stops every thread of a server for seconds.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            # Python's strings, and JSON's, may hold half of a UTF-16 pair; UTF-8 cannot, nor can the backend.
            place = next((place for place, sign in enumerate(text) if "\ud800" <= sign <= "\udfff"), None)
            if place is None:
                raise
            raise RequestError(
                f"prompt or messages hold U+{ord(text[place]):04X}, half of a surrogate pair, which is no text "
                f"(character {place} of what was to be tokenised)",
                param="prompt",
            ) from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD, ids without a token become nothing."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json, for libraries that read those."""
        return self._backend.to_str()

    def token_of(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, None if the id has none."""
        return self._backend.id_to_token(token_id)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a chat, ready to be answered.

        Args:
            messages: dicts with "role" and "content", both strings; content may be None beside "tool_calls".
            add_generation_prompt: end with what begins the assistant's answer.
            **variables: further variables of the template, for example tools.

        Raises:
            RequestError: there is no template, a message is malformed, or the template refuses the chat.
        """
        text = self.render_chat(messages, add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text that `apply_chat_template` encodes; same arguments and errors."""
        if self._template is None:
            raise RequestError(f"this tokenizer has no chat template; add {TEMPLATE_FILE} or send a plain prompt")
        _check_messages(messages)
        try:
            return self._template.render(
                **self._special_tokens,
                **variables,
                messages=messages,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _token_text(config: Mapping[str, Any], name: str) -> str | None:
    """A special token's text; the file holds it bare or as an object with its content."""
    token = config.get(name)
    token = token.get("content") if isinstance(token, Mapping) else token
    if token is not None and not isinstance(token, str):
        raise CheckpointError(f"{CONFIG_FILE} {name}={token!r}: must be a string or an object with content")
    return token


def _config_template(config: Mapping[str, Any]) -> str | None:
    """The template of tokenizer_config.json, which may list several by name."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    return _default_template(template)


def _default_template(template: str | Mapping[str, str] | None) -> str | None:
    if not isinstance(template, Mapping):
        return template
    if "default" not in template:
        raise CheckpointError(f"chat templates {sorted(template)} include no 'default'")
    return template["default"]


def _refuse_chat(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Plain JSON: jinja2's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _compile(source: str) -> jinja2.Template:
    """Compile a template; the checkpoint is not trusted, so it may neither reach Python nor change its input."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse_chat
    environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"the chat template does not parse, line {error.lineno}: {error}") from error


def _check_messages(messages: Any) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a non-empty list of dicts with role and content")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}] must be a dict, not {type(message).__name__}")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise RequestError(f"messages[{index}].role={message.get('role')!r} must be a non-empty string")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise RequestError(f"messages[{index}].content must be a string, not {type(content).__name__}")
