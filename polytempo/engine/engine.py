"""The engine: the only owner of rows, row state and device. Add requests, step, collect."""

from __future__ import annotations

import time

from polytempo.cache.layout import StateShape
from polytempo.cache.store import RowStore
from polytempo.config import AUTO, EngineConfig
from polytempo.engine.draft_length import DraftPolicy
from polytempo.engine.propose import MTPProposer, NoProposer, Proposer
from polytempo.engine.row import Request, Row
from polytempo.engine.scheduler import Scheduler
from polytempo.engine.stats import DraftStats
from polytempo.engine.step import run_step
from polytempo.engine.target import Target
from polytempo.errors import ConfigError, RequestError
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.rope import RopeTables
from polytempo.types import FinishReason


class Engine:
    """Runs any number of requests over a fixed number of slots; rows refill slots as others finish.

    Attributes:
        scheduler: which rows wait and run.
        target: model and state.
        proposer: who drafts.
        policy: how many drafts each row gets.
        num_steps: target forwards so far.
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
        self.scheduler = Scheduler(config)
        shape = StateShape.build(model.config, config)
        store = RowStore.allocate(shape, config.max_rows, model.dtype, model.device)
        tables = RopeTables.build(model.config, config.max_model_len, model.device)
        chosen = model if config.kernels == AUTO else model.with_kernels(config.kernels)
        _ = chosen.native  # built here, if ever, and not in the first step
        self.target = Target(chosen, tables, store, config)
        self.proposer = proposer or _proposer(self.target)
        self.policy = DraftPolicy(config)
        self.num_steps = 0
        self.stats = DraftStats()

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
            raise RequestError(f"request {request.request_id!r} has an empty prompt; it needs at least one token")
        if len(prompt) >= limit:
            raise RequestError(
                f"request {request.request_id!r} has a prompt of {len(prompt)} tokens; the context holds {limit} "
                "(max_model_len), prompt and at least one output token together"
            )
        for position, token_id in enumerate(prompt):
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"request {request.request_id!r} has token id {token_id} at position {position}; the model's "
                    f"vocabulary has ids 0..{vocab_size - 1}"
                )
        request.params.validate_for_vocab(vocab_size)

    def add(self, rows: list[Row]) -> None:
        """Queue the rows of one checked request."""
        for row in rows:
            self.scheduler.add(row)

    def abort(self, request_id: str) -> int:
        """End every row of a request; returns how many were still running or waiting."""
        rows = [*self.scheduler.running, *self.scheduler.waiting]
        ended = [row for row in rows if row.request.request_id == request_id and not row.is_finished]
        for row in ended:
            row.finish(FinishReason.ABORT)
        self._release()
        return len(ended)

    @property
    def has_work(self) -> bool:
        """Whether any row waits or runs."""
        return self.scheduler.has_work

    def step(self) -> list[Row]:
        """Admit, run one forward, release; returns the rows that finished."""
        for row in self.scheduler.admit():
            # Zeroed at admission: whatever its last owner left, even NaN, cannot reach this row.
            self.target.store.clear(row.slot)
        planned = self.scheduler.plan()
        if planned:
            run_step(self.target, self.proposer, self.policy, planned)
            self.num_steps += 1
        return self._release()

    def _release(self) -> list[Row]:
        finished = self.scheduler.release_finished()
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
