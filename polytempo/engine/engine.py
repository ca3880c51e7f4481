"""The engine: the only owner of rows, row state and device. Add requests, step, collect."""

from __future__ import annotations

import time

from polytempo.cache.layout import StateShape
from polytempo.cache.store import RowStore
from polytempo.cache.view import BatchView
from polytempo.device import current_device
from polytempo.engine.capability import granted_advance_mode
from polytempo.engine.draft_length import DraftPolicy
from polytempo.engine.prefix import PrefixCache
from polytempo.engine.propose import MTPProposer, NoProposer, Proposer
from polytempo.engine.row import Request, Row
from polytempo.engine.scheduler import Scheduler, refuse_overflow
from polytempo.engine.share import PromptSharing
from polytempo.engine.stats import DraftStats, StepSeconds
from polytempo.engine.step import run_step
from polytempo.engine.target import Target
from polytempo.engine_config import AUTO, EngineConfig
from polytempo.errors import ConfigError, RequestError
from polytempo.kernels.threads import torch_on_one_thread
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.forward import uses_kernels
from polytempo.model.rope import RopeTables
from polytempo.thread_placement import warn_about_threads
from polytempo.types import FinishReason


class Engine:
    """Runs any number of requests over a fixed number of slots; rows refill slots as others finish.

    Attributes:
        scheduler: which rows wait and run.
        target: model and state.
        sharing: gives a prompt that one choice of a request has read to the others; None for `left_aligned`.
        proposer: who drafts.
        policy: how many drafts each row gets.
        advance_mode: how far rows advance: `kv_advance`, or COHORT if a part lacks per-row positions.
        num_steps: target forwards so far.
        seconds: what they took, by phase.
        stats: drafts of all finished rows.
    """

    def __init__(self, model: DeepseekV4, config: EngineConfig, proposer: Proposer | None = None) -> None:
        limit = model.config.max_position_embeddings
        if config.max_model_len > limit:
            raise ConfigError(
                f"engine option 'max_model_len' is {config.max_model_len}; the model's config allows at most {limit} "
                "positions ('max_position_embeddings')"
            )
        self.config = config
        shape = StateShape.build(model.config, config)
        store = RowStore.allocate(shape, config.max_rows, model.dtype, model.device, config.memory)
        self.scheduler = Scheduler(config, store.pool)
        tables = RopeTables.build(model.config, config.max_model_len, model.device)
        chosen = model if config.kernels == AUTO else model.with_kernels(config.kernels)
        if model.device.type == "cpu":
            warn_about_threads()
        _ = chosen.native  # built here, if ever, and not in the first step
        prefix_cache = PrefixCache(store, config.prefix_cache) if config.prefix_cache else None
        self.target = Target(chosen, tables, store, config, prefix_cache)
        self.proposer = proposer or _proposer(self.target)
        shares = self.scheduler.shares_prompts
        self.sharing = PromptSharing(store, self.scheduler) if shares else None
        self.policy = DraftPolicy(config)
        self.num_steps = 0
        self.seconds = StepSeconds()
        self.stats = DraftStats()
        self._is_stepping = False

    @property
    def proposer(self) -> Proposer:
        """Who drafts. Setting it decides the advance mode anew: it takes part in every row's positions."""
        return self._proposer

    @proposer.setter
    def proposer(self, proposer: Proposer) -> None:
        self._proposer = proposer
        parts = {"cache layout": self.target.store.target_windows, "mask builder": BatchView, "step": self.target,
                 "draft chain": proposer}  # fmt: skip
        self.advance_mode = granted_advance_mode(self.config.advance_mode, parts)

    def check_request(self, request: Request) -> None:
        """Refuse what this model or these limits cannot serve.

        Args:
            request: not added yet.

        Raises:
            RequestError: the prompt is empty, too long, or holds an id outside the vocabulary.
        """
        vocab_size, limit = self.target.model.config.vocab_size, self.config.max_model_len
        prompt = request.prompt_token_ids
        if not len(prompt):
            raise RequestError(
                f"request {request.request_id!r} has an empty prompt; it needs at least one token", param="prompt"
            )
        if len(prompt) >= limit:
            raise RequestError(
                f"request {request.request_id!r} has a prompt of {len(prompt)} tokens; the context holds {limit} "
                "(max_model_len), prompt and at least one output token together",
                param="prompt",
                code="context_length_exceeded",
            )
        for position, token_id in enumerate(prompt):
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"request {request.request_id!r} has token id {token_id} at position {position} of its prompt; the "
                    f"model's vocabulary has ids 0..{vocab_size - 1}",
                    param="prompt",
                )
        request.params.validate_for_vocab(vocab_size)

    def add(self, rows: list[Row]) -> None:
        """Queue the rows of one checked request.

        Args:
            rows: all choices of the request.

        Raises:
            CapacityError: the queue is full; none of the rows was queued.
            RequestError: there are more rows than could ever wait and run at once.
        """
        scheduler = self.scheduler
        refuse_overflow(len(scheduler.running) + len(scheduler.waiting), len(rows), self.config)
        for row in rows:
            self.scheduler.add(row)

    def abort(self, request_id: str) -> int:
        """End every row of a request; returns how many were still running or waiting.

        May be called inside a step too, whatever the rows are at: what the step still finds out about them is dropped,
        and their slots are free at its end.
        """
        rows = [*self.scheduler.running, *self.scheduler.waiting]
        ended = [row for row in rows if row.request.request_id == request_id and not row.is_finished]
        for row in ended:
            row.finish(FinishReason.ABORT)
        if not self._is_stepping:
            self._release()
        return len(ended)

    @property
    def has_work(self) -> bool:
        """Whether any row waits or runs."""
        return self.scheduler.has_work

    def step(self) -> list[Row]:
        """Admit, run one forward, release; returns the rows that finished."""
        started = time.perf_counter()
        late = self._give_up_late_rows()
        for row in self.scheduler.admit():
            # Zeroed at admission: whatever its last owner left, even NaN, cannot reach this row.
            self.target.store.clear(row.slot)
            if self.sharing is None or not self.sharing.seat(row):
                self._reuse_prefix(row)
        planned = self.scheduler.plan()
        self.seconds.plan += time.perf_counter() - started
        if planned:
            self._is_stepping = True
            in_kernels = uses_kernels(self.target.model, self.target.store.target_windows)
            try:
                with torch_on_one_thread(in_kernels), current_device(self.target.store.device):
                    seconds = run_step(self.target, self.proposer, self.policy, self.advance_mode, planned)
            finally:
                self._is_stepping = False
            if self.sharing is not None:
                self.sharing.hand_over(planned)
            self.seconds.add(seconds)
            self.num_steps += 1
        finished = late + self._release()
        if not self.scheduler.running:
            self.target.store.shrink()
        return finished

    def _reuse_prefix(self, row: Row) -> None:
        """Start from the longest prefix whose state is known, if any."""
        if self.target.prefix_cache is not None:
            streams = self.target.prefix_cache.restore(row)
            if streams is not None:
                self.proposer.resume(row, streams)

    def _give_up_late_rows(self) -> list[Row]:
        """End and release rows whose deadline has passed, wherever they are; returns them."""
        now = time.monotonic()
        for row in (*self.scheduler.running, *self.scheduler.waiting):
            deadline = row.request.deadline
            if deadline is not None and now >= deadline and not row.is_finished:
                allowed = deadline - row.request.arrival
                reason = f"the deadline of {allowed:g} s passed after {len(row.output_token_ids)} output tokens"
                row.finish(FinishReason.ABORT, error=reason)
        return self._release()

    def _release(self) -> list[Row]:
        finished = self.scheduler.release_finished()
        if self.sharing is not None:
            self.sharing.drop_unwanted()
        now = time.monotonic()
        for row in finished:
            row.request.finished = now
            self.stats.add(row.stats)
        return finished


def _proposer(target: Target) -> Proposer:
    """The proposer that the options and the checkpoint allow; asking for a missing one is refused by name."""
    speculate, config = target.config.speculate, target.model.config
    if speculate == "none" or (speculate == "auto" and not config.num_mtp_blocks):
        return NoProposer()
    if not config.num_mtp_blocks:
        raise ConfigError(
            "engine option 'speculate' is 'mtp', but the model has no MTP block (config field "
            "'num_nextn_predict_layers' is 0 or its weights are missing); use speculate='none'"
        )
    return MTPProposer(target)
