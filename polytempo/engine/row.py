"""A running sequence: every number and token of it, and the rules by which it grows and ends. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polytempo.engine.bad_words import BadWords
from polytempo.engine.grammar import GrammarState
from polytempo.engine.stats import DraftStats
from polytempo.engine.text import OutputText
from polytempo.errors import InvariantError
from polytempo.types import FinishReason, Logprob, SamplingParams


@dataclass
class Request:
    """What a client submitted, checked and tokenised; shared by its n rows.

    Attributes:
        request_id: unique within an engine.
        prompt: the text, None if token ids were submitted.
        prompt_token_ids: at least one.
        params: how to sample and stop.
        seed: the noise seed, drawn if params.seed is None.
        stop_token_ids: EOS (unless ignored) and params.stop_token_ids.
        bad_words: token sequences of params.bad_words.
        arrival: seconds of the monotonic clock.
        priority: of waiting requests, the lowest goes first; equals in order of arrival.
        deadline: when the request is given up, seconds of the monotonic clock, or None.
        prompt_logprobs: filled by whichever choice reads the prompt, if asked for; entry 0 is None.
        first_token: when the first output token came, seconds of the monotonic clock.
        finished: when the last choice ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    bad_words: BadWords
    arrival: float
    priority: int = 0
    deadline: float | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    first_token: float | None = None
    finished: float | None = None

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]


@dataclass
class Row:
    """One choice of a request while it runs.

    Between steps a decoding row has `kv_len == num_tokens - 1`: the last token's state is not in the store yet.

    Attributes:
        request: what it answers.
        choice: which of the request's n choices.
        text: turns tokens into text and finds stop strings; None without a tokenizer.
        slot: its seat in the row store, None while it waits.
        kv_len: positions whose state is in the store.
        mtp_len: positions whose key of the MTP block is in the store, as far as the last window goes; those after it
            are made when the row drafts. Keys of drafts are never counted: it ends at kv_len.
        drafts: proposed tokens for positions num_tokens, num_tokens + 1, …; verified in the next step.
        output_token_ids: committed output.
        logprobs: one dict per output token, if asked for.
        finish_reason: None while it runs.
        stop_reason: the stop string or id that ended it.
        error: what failed, if finish_reason is ERROR; why it was given up, if ABORT.
        num_cached: prompt tokens whose state came from the prefix cache when it was first seated.
        num_set_back: how often it lost its seat to memory and started over.
        undrafted_len: tokens that it had when a verify of drafts failed: it drafts again only when it has more.
        stats: its drafts and what became of them.
        grammar: what the request's grammar allows next, None without one.
    """

    request: Request
    choice: int
    text: OutputText | None = None
    slot: int | None = None
    kv_len: int = 0
    mtp_len: int = 0
    drafts: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached: int = 0
    num_set_back: int = 0
    undrafted_len: int = 0
    stats: DraftStats = field(default_factory=DraftStats)
    grammar: GrammarState | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and committed output."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    @property
    def is_decoding(self) -> bool:
        """Whether all of its tokens but the last are in the store."""
        return self.kv_len == self.num_tokens - 1

    @property
    def is_reading_prompt(self) -> bool:
        """Whether prompt tokens before the last are missing from the store."""
        return self.kv_len < len(self.request.prompt_token_ids) - 1

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions start … end − 1."""
        prompt = self.request.prompt_token_ids
        prompt_len = len(prompt)
        output = self.output_token_ids[max(start - prompt_len, 0) : max(end - prompt_len, 0)]
        return [*prompt[start:end], *output]

    def check(self) -> None:
        """Raise InvariantError unless the row's numbers agree with one another."""
        if not 0 <= self.kv_len < self.num_tokens:
            raise InvariantError(
                f"request {self.request.request_id!r} choice {self.choice}: kv_len {self.kv_len} of "
                f"{self.num_tokens} tokens; the last token is never in the store"
            )
        if self.request.params.logprobs is not None and len(self.logprobs) != len(self.output_token_ids):
            raise InvariantError(
                f"request {self.request.request_id!r} choice {self.choice}: {len(self.logprobs)} logprob entries "
                f"for {len(self.output_token_ids)} output tokens"
            )

    def commit(self, token_id: int, logprobs: dict[int, Logprob] | None, max_model_len: int) -> None:
        """Append one output token and decide whether it ends the row.

        EOS and stop ids end it first, then stop strings, then max_tokens and the context.

        Args:
            token_id: the target's token.
            logprobs: its entry, if asked for.
            max_model_len: most tokens of the sequence.
        """
        self.output_token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        params = self.request.params
        if token_id in self.request.stop_token_ids:
            if self.text is not None and params.include_stop_str_in_output:
                self.text.append([token_id])
            is_named = token_id in (params.stop_token_ids or ())
            self.finish(FinishReason.STOP, token_id if is_named else None)
            return
        stop = self.text.append([token_id]).stop if self.text is not None else None
        if stop is not None:
            self.finish(FinishReason.STOP, stop)
        elif len(self.output_token_ids) == params.max_tokens or self.num_tokens >= max_model_len:
            self.finish(FinishReason.LENGTH)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None, error: str | None = None) -> None:
        """End the row; text that was held back for a stop string is delivered."""
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
        self.drafts = []
        if self.text is not None:
            self.text.finish()
