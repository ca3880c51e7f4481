"""From finished rows to what the client gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from polytempo.engine.row import Row
from polytempo.types import CompletionOutput, Logprob, RequestOutput, RequestTimings


def completion_output(row: Row, decode: Callable[[int], str] | None) -> CompletionOutput:
    """One choice.

    Args:
        row: finished or running.
        decode: token id -> text for logprob entries; None leaves their text out.

    Returns:
        The choice, with text up to what is certain.
    """
    logprobs = cumulative = None
    if row.request.params.logprobs is not None:
        logprobs = [_with_text(entry, decode) for entry in row.logprobs]
        chosen = zip(logprobs, row.output_token_ids, strict=True)
        cumulative = sum(entry[token_id].logprob for entry, token_id in chosen)
    return CompletionOutput(
        index=row.choice,
        text="" if row.text is None else row.text.text,
        token_ids=tuple(row.output_token_ids),
        logprobs=logprobs,
        cumulative_logprob=cumulative,
        finish_reason=row.finish_reason,
        stop_reason=row.stop_reason,
        error=row.error,
        num_verifies=row.stats.num_verifies,
        num_drafted=row.stats.num_drafted,
        num_accepted=row.stats.num_accepted,
    )


def request_output(rows: Sequence[Row], decode: Callable[[int], str] | None) -> RequestOutput:
    """The output of one request from its n rows, in order of choice.

    Args:
        rows: all rows of the request.
        decode: as for `completion_output`.

    Returns:
        The output.
    """
    request = rows[0].request
    prompt_logprobs = request.prompt_logprobs
    if prompt_logprobs is not None:
        prompt_logprobs = [entry and _with_text(entry, decode) for entry in prompt_logprobs]
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=tuple(request.prompt_token_ids),
        prompt_logprobs=prompt_logprobs,
        outputs=[completion_output(row, decode) for row in rows],
        finished=all(row.is_finished for row in rows),
        num_cached_tokens=rows[0].num_cached,
        timings=RequestTimings(request.arrival, request.first_token, request.finished),
    )


def _with_text(entry: dict[int, Logprob], decode: Callable[[int], str] | None) -> dict[int, Logprob]:
    if decode is None:
        return entry
    return {token_id: replace(logprob, decoded_token=decode(token_id)) for token_id, logprob in entry.items()}
