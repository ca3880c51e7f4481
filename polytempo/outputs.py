"""What a client gets back: frozen, no torch. Imported from `polytempo.types`, like the rest of what a client sees."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from polytempo.errors import InvariantError


class FinishReason(str, enum.Enum):
    """Why an output ended: at a stop, at a length limit, by the client, or by a failure of this request."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Logprob:
    """One token's raw log-probability; rank 1 is the most likely token, equals rank by id."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One choice of a request; text, token_ids and logprobs end at the same token.

    Attributes:
        index: which of the n choices.
        logprobs: one dict per output token, or None if they were not asked for.
        cumulative_logprob: sum of the chosen tokens' logprobs, or None.
        finish_reason: None while it runs.
        stop_reason: the stop string or stop token id that ended it; None for EOS and other reasons.
        error: what failed, if finish_reason is "error"; why it was given up, if a deadline ended it.
        num_verifies: target forwards that fed its last token, with or without drafts.
        num_drafted: drafts verified, counted before a stop trims the accepted run.
        num_accepted: of them, accepted.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_verifies: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def __post_init__(self) -> None:
        if self.finish_reason is not None:
            object.__setattr__(self, "finish_reason", FinishReason(self.finish_reason))
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise InvariantError(
                f"choice {self.index} has {len(self.token_ids)} token ids, {len(self.logprobs)} logprob entries"
            )

    @property
    def finished(self) -> bool:
        """Whether this choice has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestTimings:
    """When a request arrived, gave its first token and finished: seconds of the monotonic clock."""

    arrival: float
    first_token: float | None = None
    finished: float | None = None

    @property
    def ttft(self) -> float | None:
        """Time to first token in seconds, None before it."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def e2e(self) -> float | None:
        """Seconds from arrival to the end, None before it."""
        return None if self.finished is None else self.finished - self.arrival


@dataclass(frozen=True)
class RequestOutput:
    """What one request has produced so far.

    Attributes:
        prompt: the text prompt, None if token ids were submitted.
        prompt_logprobs: one entry per prompt token, the first None, or None if they were not asked for.
        outputs: the n choices in order of index.
        num_cached_tokens: prompt tokens that the first choice did not compute, because their state was known.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    timings: RequestTimings
    num_cached_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, counted once however many choices there are."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(len(output.token_ids) for output in self.outputs)
