"""What a grammar allows after given tokens: a pure function of them, so drafts and rewinds need no care.

The library (llguidance) is imported when the first request with a grammar comes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polytempo.config import ModelConfig
from polytempo.errors import ConfigError, RequestError
from polytempo.types import GRAMMAR_OPTIONS, SamplingParams

if TYPE_CHECKING:
    from polytempo.tokenizer import Tokenizer


class GrammarState:
    """A matcher that follows one row.

    Between calls it may be ahead of the row's committed tokens, by drafts that were rejected since: each call says
    what came before, and the matcher goes back to where that agrees with what it was fed.
    """

    def __init__(self, matcher: Any, end_mask: bytes) -> None:
        """Begin at the grammar's start.

        Args:
            matcher: an llguidance LLMatcher that was fed nothing; owned by this object.
            end_mask: the mask that allows EOS alone.
        """
        self._matcher = matcher
        self._end_mask = end_mask
        self._fed: list[int] = []

    def mask_after(self, output_token_ids: Sequence[int], drafts: Sequence[int] = ()) -> bytes | None:
        """Which tokens may follow the output and these drafts, as if the drafts had been accepted.

        Args:
            output_token_ids: the row's committed output.
            drafts: proposed tokens behind it.

        Returns:
            Bit i % 8 of byte i // 8 for token i; no bit set if the library gave up (`error` says why). None if the
            grammar forbids one of the drafts, which verification then rejects, or if one is EOS, which ends the row:
            this position is never reached.
        """
        tokens = [*output_token_ids, *drafts]
        self._go_back(tokens)
        new = tokens[len(self._fed) :]
        if new and not self.error:
            if self._matcher.validate_tokens(new) < len(new):
                return None
            self._matcher.consume_tokens(new)
            self._fed = tokens
        if self.error:
            return bytes(len(self._end_mask))
        return self._end_mask if self._matcher.is_stopped() else self._matcher.compute_bitmask()

    @property
    def error(self) -> str:
        """Why the library gave up, for example on a grammar that is too complex; empty in the normal case."""
        return _error_of(self._matcher)

    def _go_back(self, tokens: list[int]) -> None:
        """Roll the matcher back to the longest common beginning of `tokens` and what it was fed."""
        common = len(self._fed)
        while self._fed[:common] != tokens[:common]:
            common -= 1
        if common < len(self._fed):
            self._matcher.rollback(len(self._fed) - common)
            self._fed = self._fed[:common]


class CompiledGrammar:
    """A checked grammar; its rows begin from copies of one matcher."""

    def __init__(self, matcher: Any, end_mask: bytes) -> None:
        self._matcher = matcher
        self._end_mask = end_mask

    def new_state(self) -> GrammarState:
        """The state of a row without output."""
        return GrammarState(self._matcher.deep_copy(), self._end_mask)


class GrammarCompiler:
    """Turns the grammar options of requests into matchers over a tokenizer's vocabulary; safe in any thread."""

    def __init__(self, tokenizer: Tokenizer | None, config: ModelConfig) -> None:
        """Remember whose vocabulary; the tokenizer is read when the first grammar comes.

        Args:
            tokenizer: None refuses every grammar.
            config: gives the vocabulary size, which may exceed the tokenizer's, and the EOS ids.
        """
        self._tokenizer, self._config = tokenizer, config
        self._library_tokenizer: Any = None
        self._lock = threading.Lock()

    def compile(self, params: SamplingParams) -> CompiledGrammar:
        """Check and compile the one grammar option of `params`.

        Raises:
            RequestError: the grammar is refused, or there is no tokenizer or no EOS id to end it with.
            ConfigError: the library is not installed.
        """
        name = next(name for name in GRAMMAR_OPTIONS if getattr(params, name))
        if self._tokenizer is None or not self._config.eos_token_ids:
            missing = "tokenizer" if self._tokenizer is None else "EOS token"
            raise RequestError(f"{name} needs a {missing}, and the model has none", param=name)
        library = _library()
        with self._lock:
            if self._library_tokenizer is None:
                self._library_tokenizer = self._read_tokenizer(library)
        try:
            matcher = self._matcher(library, name, getattr(params, name))
            reason = _error_of(matcher) or _error_at_start(matcher)
        except ValueError as error:  # some schemas are not reported but raised
            reason = str(error)
        if reason:
            raise RequestError(f"SamplingParams {name} is refused: {' '.join(reason.split())[:300]}", param=name)
        return CompiledGrammar(matcher, self._end_mask())

    def _matcher(self, library: Any, name: str, value: Any) -> Any:
        if name in ("json_object", "json_schema"):
            schema = {"type": "object"} if name == "json_object" else json.loads(value)
            # Compact, since a small model that may write whitespace can write it for ever.
            source = library.LLMatcher.grammar_from_json_schema(json.dumps(schema), {"whitespace_flexible": False})
        elif name == "regex":
            source = library.LLMatcher.grammar_from_regex(value)
        else:
            source = library.LLMatcher.grammar_from_lark(value)
        return library.LLMatcher(self._library_tokenizer, source, log_level=0)

    def _read_tokenizer(self, library: Any) -> Any:
        eos = list(self._config.eos_token_ids)
        return library.LLTokenizer(self._tokenizer.to_json(), n_vocab=self._config.vocab_size, eos_token=eos)

    def _end_mask(self) -> bytes:
        bits = bytearray((self._config.vocab_size + 31) // 32 * 4)
        for token_id in self._config.eos_token_ids:
            bits[token_id // 8] |= 1 << token_id % 8
        return bytes(bits)


def _error_of(matcher: Any) -> str:
    """Why a matcher gave up, without the dump of its state; empty if it did not."""
    return matcher.get_error().split("<state>")[0].strip() if matcher.is_error() else ""


def _error_at_start(matcher: Any) -> str:
    """Why a grammar that compiled, say `a{1000000}`, is given up at the first token that it allows; empty if not."""
    probe = matcher.deep_copy()
    mask = int.from_bytes(probe.compute_bitmask(), "little")
    if mask and not probe.is_error():
        probe.consume_token((mask & -mask).bit_length() - 1)
    return _error_of(probe)


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError("grammars need the package llguidance; pip install 'polytempo[serve]'") from None
    return llguidance
