"""One step, top to bottom: plan, forward, sample, commit.

Worked example, two rows. Row a (slot 0) holds prompt A B C D and has emitted E: kv_len 4, its last token E is
not in the store. Row b (slot 1) is new, with a prompt of 300 tokens and max_chunk 256.
    plan     a brings [E] at position 4; b brings its tokens 0 … 255
    forward  257 packed tokens; E's keys land in a's cell 4, b's in its own cells
    sample   only a reached its end, so only its logits are computed: the target says F
    commit   a is A B C D | E F with kv_len 5; b has kv_len 256 and brings tokens 256 … 299 next time
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polytempo.cache.layout import check_segments
from polytempo.cache.store import RowStore
from polytempo.cache.view import BatchView
from polytempo.config import EngineConfig
from polytempo.engine.logprobs import gather_logprobs
from polytempo.engine.row import Row
from polytempo.engine.sampling import SamplingPosition, sample
from polytempo.engine.scheduler import PlannedRow
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.forward import target_forward
from polytempo.model.rope import RopeTables
from polytempo.types import FinishReason, Logprob


@dataclass(frozen=True)
class Target:
    """What a forward needs of the engine: weights, rotary tables, every row's state, the limits."""

    model: DeepseekV4
    tables: RopeTables
    store: RowStore
    config: EngineConfig


@torch.inference_mode()
def run_step(target: Target, planned: Sequence[PlannedRow]) -> None:
    """Advance the planned rows by one forward.

    Rows whose tokens are all in the store afterwards gain one output token; prompt chunks only fill the store.

    Args:
        target: model and state.
        planned: at least one row; finished rows keep their finish_reason for the scheduler to release.
    """
    segments = [item.segment for item in planned]
    check_segments(segments, target.config)
    model_config = target.model.config
    view = BatchView.build(segments, model_config.sliding_window, model_config.compress_ratios, target.model.device)
    streams = target_forward(target.model, target.tables, target.store, view)
    for item in planned:
        item.row.kv_len = item.segment.end
    _record_prompt_logprobs(target, planned, streams)
    sampled = [(item.row, last) for item, last in zip(planned, view.last_token_idx, strict=True) if item.reaches_end]
    if sampled:
        rows = [row for row, _ in sampled]
        logits = target.model.logits(streams[torch.stack([last for _, last in sampled])]).float()
        _sample_and_commit(rows, logits, target.config.max_model_len)


def _sample_and_commit(rows: Sequence[Row], logits: Tensor, max_model_len: int) -> None:
    """Draw one token per row from logits [R, V] and commit it; a row without one fails alone."""
    drawn = sample(logits, [_sampling_position(row) for row in rows])
    token_ids, failures = drawn.token_ids.tolist(), drawn.failures()
    entries = _logprob_entries(rows, logits, drawn.token_ids.clamp(min=0))
    now = time.monotonic()
    for row_idx, row in enumerate(rows):
        if row_idx in failures:
            row.finish(FinishReason.ERROR, error=f"position {row.num_tokens}: {failures[row_idx]}")
            continue
        if row.request.first_token is None:
            row.request.first_token = now
        row.commit(token_ids[row_idx], entries[row_idx], max_model_len)


def _sampling_position(row: Row) -> SamplingPosition:
    request = row.request
    return SamplingPosition(
        params=request.params,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=row.output_token_ids,
        position=row.num_tokens,
        seed=request.seed,
        choice=row.choice,
        stop_token_ids=request.stop_token_ids,
        bad_word_ids=request.bad_word_ids,
    )


def _logprob_entries(rows: Sequence[Row], logits: Tensor, token_ids: Tensor) -> list[dict[int, Logprob] | None]:
    """The target's log-probabilities of the drawn tokens, for rows that asked."""
    entries: list[dict[int, Logprob] | None] = [None] * len(rows)
    asking = [row_idx for row_idx, row in enumerate(rows) if row.request.params.logprobs is not None]
    if asking:
        place = torch.tensor(asking, device=logits.device)
        counts = [rows[row_idx].request.params.logprobs for row_idx in asking]
        for row_idx, entry in zip(asking, gather_logprobs(logits[place], token_ids[place], counts), strict=True):
            entries[row_idx] = entry
    return entries


def _record_prompt_logprobs(target: Target, planned: Sequence[PlannedRow], streams: Tensor) -> None:
    """Log-probabilities of prompt tokens that this forward predicts, for requests that asked; once per request."""
    first = 0
    for item in planned:
        row, segment, count = item.row, item.segment, len(item.segment.token_ids)
        request = row.request
        end = min(segment.end, len(request.prompt_token_ids) - 1)
        if request.params.prompt_logprobs is not None and row.choice == 0 and end > segment.start:
            logits = target.model.logits(streams[first : first + end - segment.start])
            following = torch.tensor(request.prompt_token_ids[segment.start + 1 : end + 1], device=logits.device)
            request.prompt_logprobs += gather_logprobs(logits, following, request.params.prompt_logprobs)
        first += count
