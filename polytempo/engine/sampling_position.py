"""What the token at one position depends on, besides its logits. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polytempo.engine.bad_words import BadWords
from polytempo.types import SamplingParams


@dataclass(slots=True)
class SamplingPosition:
    """All that the token at one position depends on, besides its logits. Made for every position: it must cost little.

    Attributes:
        params: the request's options.
        prompt_token_ids: the prompt.
        output_token_ids: the output before this position, but for drafts.
        position: absolute index of the token about to be drawn.
        seed: the request's noise seed (`noise.resolve_seed`).
        choice: which of the request's n choices.
        stop_token_ids: EOS and stop ids, banned until params.min_tokens are out.
        bad_words: token sequences that must not be completed.
        grammar_mask: what the request's grammar allows here, bit i % 8 of byte i // 8 for token i; None is everything.
        drafts: behind the output, taken for accepted.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    position: int
    seed: int
    choice: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: BadWords = BadWords()
    grammar_mask: bytes | None = None
    drafts: Sequence[int] = ()

    @property
    def bans_stops(self) -> bool:
        """Whether min_tokens still keeps the output from ending here."""
        num_output = len(self.output_token_ids) + len(self.drafts)
        return num_output < self.params.min_tokens and bool(self.stop_token_ids)

    @property
    def history(self) -> Sequence[int]:
        """Output and drafts."""
        return [*self.output_token_ids, *self.drafts] if self.drafts else self.output_token_ids

    @property
    def is_plain(self) -> bool:
        """Whether the raw logits' highest is the answer: greedy, and nothing edits the logits."""
        edits = self.params.logit_bias or self.bad_words or self.bans_stops
        return self.params.is_plain and not edits and self.grammar_mask is None
