"""One step, top to bottom: plan, target forward, sample, accept, commit, propose.

Worked example, two rows. Row a (slot 0) has prompt A B C D and has emitted E: its kv_len is 4, since the last
token's state is not in the store yet. It drafted F X. Row b (slot 1) is new, a prompt of 300 with max_chunk 256.
    plan     a brings [E, F, X] at positions 4, 5, 6; b brings its tokens 0 … 255
    forward  259 packed tokens; a's keys land in its cells 4, 5, 6
    sample   the target's own tokens after E, F, X are F, G, ?; b has not reached its end and samples nothing
    accept   F agrees, X does not: one draft accepted, G is the correction token
    commit   a is A B C D | E F G with kv_len 6; X's state at position 6 will be overwritten by G's. b has kv_len 256
    propose  a's MTP keys of positions 4 and 5 are rewritten from the target's streams, then it drafts after G
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from polytempo.cache.layout import check_segments
from polytempo.device import to_device
from polytempo.engine.accept import Verdict, accept, advance
from polytempo.engine.draft_length import DraftPolicy
from polytempo.engine.draw import logprob_entries, sampling_position
from polytempo.engine.logprobs import gather_logprobs
from polytempo.engine.propose import CaughtUp, Proposer
from polytempo.engine.row import Row
from polytempo.engine.sampling import sample
from polytempo.engine.scheduler import PlannedRow
from polytempo.engine.stats import StepSeconds
from polytempo.engine.step_clock import StepClock
from polytempo.engine.target import Target
from polytempo.engine_config import AdvanceMode
from polytempo.model.forward import target_forward
from polytempo.types import FinishReason, Logprob


@torch.inference_mode()
def run_step(
    target: Target, proposer: Proposer, policy: DraftPolicy, mode: AdvanceMode, planned: Sequence[PlannedRow]
) -> StepSeconds:
    """Advance the planned rows by one target forward.

    Rows whose last token is fed gain accepted + 1 output tokens, each by its own count; prompt chunks only fill
    the store.

    Args:
        target: model and state.
        proposer: makes the drafts of the next step.
        policy: says how many; told what the step cost if all rows were decoding.
        mode: how far rows advance.
        planned: at least one row; finished rows keep their finish_reason for the scheduler to release.

    Returns:
        What each phase took.
    """
    clock = StepClock(target.store.device)
    segments = [item.segment for item in planned]
    check_segments(segments, target.config)
    view = target.store.target_view(segments, target.model.config.compress_ratios)
    num_drafts = sum(item.num_drafts for item in planned)
    keeps_streams = proposer.needs_streams and not num_drafts
    clock.mark()
    streams = target_forward(target.model, target.tables, target.store, view, keeps_streams=keeps_streams)
    clock.mark()
    firsts = view.first_token_idx
    _record_prompt_logprobs(target, planned, firsts, streams)
    verifying = [place for place, item in enumerate(planned) if item.reaches_end]
    for item in planned:
        item.row.kv_len = item.segment.end - item.num_drafts
    if verifying:
        chosen = [planned[place] for place in verifying], [firsts[place] for place in verifying]
        _verify(target, policy, mode, *chosen, streams)
    going_on = [CaughtUp(item.row, item.segment.start, first)
                for item, first in zip(planned, firsts, strict=True) if not item.row.is_finished]  # fmt: skip
    verified = clock.mark()  # the device is not behind: the drawn tokens were read
    # A prompt's tokens cost less than as many verify positions, and would pass for cheap drafts.
    is_timed = proposer.can_draft and view.num_tokens == len(planned) + num_drafts
    if is_timed:
        policy.record_verifying(view.num_tokens, num_drafts > 0, verified)
    rows = [item.row for item in going_on]
    draft_lens = policy.lengths(rows) if proposer.can_draft else [0] * len(rows)
    proposer.propose(going_on, streams, draft_lens, keeps_streams)
    clock.mark()
    if target.prefix_cache is not None:
        for item in going_on:
            target.prefix_cache.keep(item.row, item.start, streams[item.token_idx :])
    seconds = StepSeconds(*clock.phases())
    if is_timed:
        policy.record_proposing(draft_lens, seconds.propose, proposer.later_seconds)
    return seconds


def _verify(
    target: Target, policy: DraftPolicy, mode: AdvanceMode, planned: Sequence[PlannedRow], firsts: Sequence[int],
    streams: Tensor,
) -> None:  # fmt: skip
    """Sample the target's token at every verify position of all rows at once, accept, commit."""
    token_idx, positions, rows = [], [], []
    for item, first in zip(planned, firsts, strict=True):
        last_token = first + len(item.segment.token_ids) - 1 - item.num_drafts
        token_idx += range(last_token, last_token + item.num_drafts + 1)
        positions += [sampling_position(item.row, item.drafts[:place]) for place in range(item.num_drafts + 1)]
        rows += [item.row] * (item.num_drafts + 1)
    if len(token_idx) < len(streams):
        streams = streams[to_device(token_idx, streams.device)]
    logits = target.model.logits(streams)
    drawn = sample(logits, positions, target.sampling_ops)
    entries = logprob_entries(rows, logits, drawn.token_ids)
    drawn_ids = drawn.token_ids.tolist()
    failures = drawn.failures(drawn_ids)
    token_ids = [None if place in failures else token for place, token in enumerate(drawn_ids)]
    starts, verdicts = [], []
    place = 0
    for item in planned:
        starts.append(place)
        verdicts.append(accept(item.drafts, token_ids[place : place + item.num_drafts + 1]))
        place += item.num_drafts + 1
    for item, verdict in zip(planned, verdicts, strict=True):
        policy.record(item.row, item.num_drafts, verdict.num_accepted)
    verdicts = advance(verdicts, mode)
    for item, verdict, start in zip(planned, verdicts, starts, strict=True):
        _commit(item, verdict, entries[start:], target.config.max_model_len)
        if verdict.failed_at is not None and not item.row.is_finished:
            if item.num_drafts:
                _start_over(target, item.row)
                continue
            reason = failures[start + verdict.failed_at]
            if item.row.grammar is not None and item.row.grammar.error:
                reason = f"the grammar cannot be followed any further: {item.row.grammar.error}"
            item.row.finish(FinishReason.ERROR, error=f"position {item.row.num_tokens}: {reason}")


def _commit(
    item: PlannedRow, verdict: Verdict, entries: Sequence[dict[int, Logprob] | None], max_model_len: int
) -> None:
    """Append the verdict's tokens until one ends the row; what a stop cuts off was never part of it."""
    row = item.row
    if row.is_finished:  # aborted since it was planned
        return
    if row.request.first_token is None and verdict.new_token_ids:
        row.request.first_token = time.monotonic()
    for token_id, entry in zip(verdict.new_token_ids, entries, strict=False):
        row.commit(token_id, entry, max_model_len)
        if row.is_finished:
            return
    # The rewind: state past this position belongs to rejected drafts and is overwritten before it can be seen.
    row.kv_len = row.num_tokens - 1


def _start_over(target: Target, row: Row) -> None:
    """Feed a row's committed tokens again from position 0, without drafts.

    State that is not finite taints what shares a key block with it (0 · NaN), though masked. It may come from a
    draft that the target never emits, so a row fails only if it fails without drafts.
    """
    target.store.clear(row.slot)
    row.kv_len, row.mtp_len, row.drafts, row.undrafted_len = 0, 0, [], row.num_tokens


def _record_prompt_logprobs(
    target: Target, planned: Sequence[PlannedRow], firsts: Sequence[int], streams: Tensor
) -> None:
    """Log-probabilities of prompt tokens that this forward predicts, for requests that asked; once per request."""
    for item, first in zip(planned, firsts, strict=True):
        row, start = item.row, item.segment.start
        request = row.request
        end = min(item.segment.end, len(request.prompt_token_ids) - 1)
        if request.prompt_logprobs is None:
            continue
        # A row that starts over passes its prompt twice, and may cut it elsewhere; so may another choice.
        new = max(start, len(request.prompt_logprobs) - 1)
        if end > new:
            logits = target.model.logits(streams[first + new - start : first + end - start])
            following = to_device(request.prompt_token_ids[new + 1 : end + 1], logits.device)
            request.prompt_logprobs += gather_logprobs(logits, following, request.params.prompt_logprobs)
