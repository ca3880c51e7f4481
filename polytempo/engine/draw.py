"""Between rows and the sampler: what a row's verify positions depend on, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polytempo.device import to_device
from polytempo.engine.logprobs import gather_logprobs
from polytempo.engine.row import Row
from polytempo.engine.sampling_position import SamplingPosition
from polytempo.types import Logprob


def sampling_position(row: Row, drafts: Sequence[int] = ()) -> SamplingPosition:
    """The position after the row's tokens and these drafts, as if the drafts had been accepted."""
    request = row.request
    return SamplingPosition(
        params=request.params,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=row.output_token_ids,
        drafts=drafts,
        position=row.num_tokens + len(drafts),
        seed=request.seed,
        choice=row.choice,
        stop_token_ids=request.stop_token_ids,
        bad_words=request.bad_words,
        grammar_mask=None if row.grammar is None else row.grammar.mask_after(row.output_token_ids, drafts),
    )


def logprob_entries(rows: Sequence[Row], logits: Tensor, token_ids: Tensor) -> list[dict[int, Logprob] | None]:
    """The target's log-probabilities of drawn tokens, for positions whose row asked.

    Args:
        rows: N, the row of each position.
        logits: [N, V], any float dtype, unprocessed.
        token_ids: [N] int64; what stands for a token that does not exist counts as token 0.

    Returns:
        N entries, None where the row did not ask.
    """
    entries: list[dict[int, Logprob] | None] = [None] * len(rows)
    asking = [place for place, row in enumerate(rows) if row.request.params.logprobs is not None]
    if asking:
        places = to_device(asking, logits.device)
        counts = [rows[place].request.params.logprobs for place in asking]
        chosen = token_ids[places].clamp(min=0)
        for place, entry in zip(asking, gather_logprobs(logits[places], chosen, counts), strict=True):
            entries[place] = entry
    return entries
