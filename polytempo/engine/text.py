"""Committed tokens to deliverable text: no half characters, no text at or after a stop string.

Every token is taken by itself, in order, so a result cannot depend on how many tokens a step happened to commit.
Knows nothing of EOS and stop ids: whoever trims the run passes only the tokens whose text belongs to the output,
that is without a stop token unless include_stop_str_in_output.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass

from polytempo.errors import InvariantError
from polytempo.tokenizer import Tokenizer
from polytempo.types import SamplingParams

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONGEST_TRUNCATED = 3  # bytes of a UTF-8 character that lacks its last


class IncrementalDetokenizer:
    """Text of a growing token list, each character once, as soon as it is certain.

    Joined, what `append` and `finish` return equals `tokenizer.decode` of all tokens, for byte-level
    tokenizers. With byte-fallback tokens a truncated last character is one U+FFFD here, not one per byte.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        """Start with no tokens."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Tokens whose text is out but which the decoder needs as left context, then tokens not all out.
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._num_shown = 0

    def append(self, token_id: int) -> str:
        """Take one token; return the text that became certain, often that of this token."""
        self._pending.append(token_id)
        text = self._pending_text()
        certain = text.rstrip(REPLACEMENT)
        delta = certain[self._num_shown :]
        if len(certain) < len(text):
            self._num_shown = max(self._num_shown, len(certain))
        elif text:
            self._context, self._pending, self._num_shown = self._pending, [], 0
            self._context_text = self._decode(self._context)
        return delta

    def finish(self) -> str:
        """No token follows: return what was held back, a truncated character as one U+FFFD."""
        held = self._pending_text()[self._num_shown :]
        held = held[: len(held) - self._num_surplus_marks()]
        self._context, self._pending, self._num_shown = [], [], 0
        return held

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip)

    def _pending_text(self) -> str:
        """Text of the pending tokens as it reads behind the context."""
        both = self._decode(self._context + self._pending)
        if both.startswith(self._context_text):
            return both[len(self._context_text) :]
        # A byte-fallback decoder takes back a character when an invalid byte follows it; ours is out already.
        return self._decode(self._pending)

    def _num_surplus_marks(self) -> int:
        """U+FFFD beyond one that a byte-fallback decoder spends on a truncated last character."""
        for width in range(_LONGEST_TRUNCATED, 1, -1):
            spellings = [self._tokenizer.token_of(token_id) or "" for token_id in self._pending[-width:]]
            matches = [_BYTE_TOKEN.fullmatch(spelling) for spelling in spellings]
            if len(matches) == width and all(matches):
                if _is_truncated_character(bytes(int(match[1], 16) for match in matches)):
                    return width - 1
        return 0


def _is_truncated_character(data: bytes) -> bool:
    """Whether `data` is the beginning of exactly one UTF-8 character."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data) == ""
    except UnicodeDecodeError:
        return False


@dataclass(frozen=True)
class TextUpdate:
    """What a run of committed tokens means for the output.

    Attributes:
        num_tokens: tokens of the run that stay in the output; fewer than given only if a stop string ended it.
        delta: text to deliver now.
        stop: the stop string that ended the output, or None.
    """

    num_tokens: int
    delta: str
    stop: str | None = None


class OutputText:
    """Text of one output: detokenises committed tokens, ends at the earliest stop string, delivers what is safe.

    The output ends in the first token that completes a stop string at output index min_tokens or later; that token
    is kept. If one token completes several, the one that begins first counts, and of two that begin together the
    shorter.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        """Start an output without tokens under the request's `params`."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._stops: tuple[str, ...] = tuple(params.stop or ())
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._delivered: list[str] = []
        self._held = ""
        self._is_closed = False

    @property
    def text(self) -> str:
        """All text delivered so far."""
        return "".join(self._delivered)

    def append(self, token_ids: Sequence[int]) -> TextUpdate:
        """Take a run of committed tokens.

        Args:
            token_ids: the next tokens of the output, any number of them.

        Returns:
            TextUpdate; tokens after the one in which a stop string ends are not taken.

        Raises:
            InvariantError: the output has ended already.
        """
        if self._is_closed:
            raise InvariantError("OutputText.append after the output has ended")
        safe: list[str] = []
        for num_before, token_id in enumerate(token_ids):
            text = self._held + self._detokenizer.append(token_id)
            match = self._find_stop(text) if self._num_tokens >= self._min_tokens else None
            self._num_tokens += 1
            if match is not None:
                begin, stop = match
                safe.append(text[: begin + len(stop)] if self._includes_stop else text[:begin])
                self._held, self._is_closed = "", True
                return TextUpdate(num_before + 1, self._deliver(safe), stop)
            self._held = text[len(text) - self._num_unsafe(text) :]
            safe.append(text[: len(text) - len(self._held)])
        return TextUpdate(len(token_ids), self._deliver(safe))

    def finish(self) -> str:
        """The output ends without a stop string: return the text still held back; nothing after one."""
        if self._is_closed:
            return ""
        self._is_closed = True
        return self._deliver([self._held, self._detokenizer.finish()])

    def _deliver(self, parts: list[str]) -> str:
        delta = "".join(parts)
        self._delivered.append(delta)
        return delta

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """Begin and string of the earliest match that ends beyond the held text; `text` begins with that.

        A match can only begin in held or new text, since text in which one may begin is held back.
        """
        found = []
        for stop in self._stops:
            begin = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if begin >= 0:
                found.append((begin, len(stop), stop))
        if not found:
            return None
        begin, _, stop = min(found)
        return begin, stop

    def _num_unsafe(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string could begin."""
        return max((_overlap(text, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` with which `text` ends."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
