"""From deltas and outputs to OpenAI's response objects: choices, log-probabilities, usage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polytempo.engine.row import Row
from polytempo.engine.text import REPLACEMENT, IncrementalDetokenizer
from polytempo.serving_thread import RequestDelta
from polytempo.tokenizer import Tokenizer
from polytempo.types import FinishReason, Logprob

LEAST_LOGPROB = -9999.0
Entry = Mapping[int, Logprob] | None


def usage(groups: Sequence[Sequence[Row]], drops_output: bool = False) -> dict[str, Any]:
    """OpenAI's `usage`: each prompt once, however many choices it has.

    Args:
        groups: rows of each prompt.
        drops_output: the output is not delivered (echo with max_tokens 0).

    Returns:
        The object; draft counts are ours. `cached_tokens` are those that each prompt's first choice did not compute.
    """
    rows = [row for group in groups for row in group]
    prompt = sum(len(group[0].request.prompt_token_ids) for group in groups)
    completion = 0 if drops_output else sum(len(row.output_token_ids) for row in rows)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(group[0].num_cached for group in groups)},
        "completion_tokens_details": {
            "drafted_tokens": sum(row.stats.num_drafted for row in rows),
            "accepted_draft_tokens": sum(row.stats.num_accepted for row in rows),
        },
    }


def finish_reason(reason: FinishReason | None) -> str | None:
    """OpenAI's word; it knows only "stop" and "length" of ours."""
    return None if reason is None else str(reason)


class TextOffsets:
    """Characters before each token of a growing text."""

    def __init__(self, tokenizer: Tokenizer, start: int, skip_special_tokens: bool) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self.position = start

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """Where the text of each of these tokens begins."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self.position)
            self.position += len(self._detokenizer.append(token_id))
        return offsets

    def finish(self) -> int:
        """The length of the whole text."""
        self.position += len(self._detokenizer.finish())
        return self.position


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes this number for what cannot be drawn."""
    return max(logprob, LEAST_LOGPROB)


class LogprobWriter:
    """Writes the log-probabilities of one choice in either of OpenAI's forms, a delta at a time."""

    def __init__(self, tokenizer: Tokenizer, decode: Callable[[int], str], skip_special_tokens: bool) -> None:
        self._tokenizer, self._decode = tokenizer, decode
        self._skip = skip_special_tokens
        self._offsets = TextOffsets(tokenizer, 0, skip_special_tokens)

    def echo(self, prompt_ids: Sequence[int], entries: Sequence[Entry]) -> dict[str, Any]:
        """The prompt's part of a completion that echoes it."""
        written = self.completion(prompt_ids, entries)
        self._offsets = TextOffsets(self._tokenizer, self._offsets.finish(), self._skip)
        return written

    def completion(self, token_ids: Sequence[int], entries: Sequence[Entry]) -> dict[str, Any]:
        """The `logprobs` of /v1/completions."""
        tops = []
        for entry in entries:
            top: dict[str, float] = {}
            for token_id, one in (entry or {}).items():
                # Two ids may have one spelling, for example two halves of characters: the likelier stays.
                text = self._decode(token_id)
                top[text] = max(_finite(one.logprob), top.get(text, LEAST_LOGPROB))
            tops.append(top if entry is not None else None)
        return {
            "tokens": [self._decode(token_id) for token_id in token_ids],
            "token_logprobs": [entry and _finite(entry[token_id].logprob)
                               for token_id, entry in zip(token_ids, entries, strict=True)],
            "top_logprobs": tops,
            "text_offset": self._offsets.take(token_ids),
        }  # fmt: skip

    def chat(self, token_ids: Sequence[int], entries: Sequence[Entry], num_top: int) -> dict[str, Any]:
        """The `logprobs` of /v1/chat/completions.

        Args:
            token_ids: chosen tokens.
            entries: one per token.
            num_top: how many top tokens to list.
        """
        content = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            ranked = sorted(entry.items(), key=lambda item: item[1].rank)[:num_top]
            top = [self._chat_token(other, one.logprob) for other, one in ranked]
            content.append(self._chat_token(token_id, entry[token_id].logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._decode(token_id)
        # A token that is part of a character has no text, so its bytes are not to be had from it.
        known = REPLACEMENT not in text
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8")) if known else None}


def merged(deltas: Sequence[RequestDelta]) -> RequestDelta:
    """All deltas of one choice as one: what a client that does not stream gets."""
    last = deltas[-1]
    has_logprobs = deltas[0].logprobs is not None
    return RequestDelta(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=[entry for delta in deltas for entry in delta.logprobs] if has_logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
    )
