"""Time decode steps of one mode: only steps in which every row of the batch decodes count."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from polytempo.engine.propose import CaughtUp, Proposer, ScriptedProposer
from polytempo.engine.row import Row
from polytempo.llm import LLM
from polytempo.types import SamplingParams


@dataclass(frozen=True)
class Mode:
    """One way to decode.

    Attributes:
        draft_len: drafts per row and step; 0 does not speculate.
        kv_advance: "per_sequence" or "cohort".
    """

    draft_len: int
    kv_advance: str = "per_sequence"

    @property
    def name(self) -> str:
        """Short label for tables."""
        if not self.draft_len:
            return "none"
        return f"mtp-{self.draft_len}" + ("" if self.kv_advance == "per_sequence" else "-cohort")

    @property
    def speculate(self) -> str:
        """The engine option."""
        return "mtp" if self.draft_len else "none"


@dataclass
class Measurement:
    """What one mode did with one batch.

    Attributes:
        mode: label.
        batch: rows.
        tokens: emitted in the timed steps.
        seconds: of the timed steps.
        propose_seconds: of them, spent proposing.
        step_ms: each timed step.
        tokens_per_forward: tokens of all rows / (rows · timed steps).
        acceptance: accepted / drafted by place in the run.
        mtp_forwards_per_step: whole-block forwards of the proposer per timed step.
        positions: per step, every row's number of tokens, for the picture.
        outputs: every row's output tokens.
    """

    mode: str
    batch: int
    tokens: int = 0
    seconds: float = 0.0
    propose_seconds: float = 0.0
    step_ms: list[float] = field(default_factory=list)
    tokens_per_forward: float = 0.0
    acceptance: list[float] = field(default_factory=list)
    mtp_forwards_per_step: float = 0.0
    positions: list[list[int]] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Decode throughput over all rows."""
        return self.tokens / self.seconds if self.seconds else 0.0


class TimedProposer:
    """Passes everything to a proposer and keeps the seconds."""

    def __init__(self, inner: Proposer) -> None:
        self.inner, self.seconds = inner, 0.0

    def propose(self, rows: Sequence[CaughtUp], streams: Tensor, draft_lens: Sequence[int]) -> None:
        """As the inner proposer."""
        start = time.perf_counter()
        self.inner.propose(rows, streams, draft_lens)
        self.seconds += time.perf_counter() - start


def oracle_script(
    outputs: Sequence[Sequence[int]], rows: Sequence[Row], acceptance: float, vocab_size: int, seed: int
) -> Callable[[Row, int], list[int]]:
    """Drafts that are right with the given probability, independently per row and position."""
    expected = {id(row): output for row, output in zip(rows, outputs, strict=True)}

    def script(row: Row, draft_len: int) -> list[int]:
        output, start = expected[id(row)], len(row.output_token_ids)
        drafts = []
        for place in range(start, min(start + draft_len, len(output))):
            is_right = random.Random(f"{seed}/{row.slot}/{place}").random() < acceptance
            drafts.append(output[place] if is_right else (output[place] + 1) % vocab_size)
        return drafts

    return script


def measure(
    llm: LLM,
    mode: Mode,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    scripted: tuple[float, Sequence[Sequence[int]]] | None = None,
) -> Measurement:
    """Decode one batch.

    Args:
        llm: with at least as many rows as prompts, built for this mode's speculate, draft_len and kv_advance.
        mode: label and draft length.
        prompts: one per row.
        max_tokens: output tokens per row.
        scripted: (acceptance, the outputs) replaces the MTP block by drafts that are right that often.

    Returns:
        The measurement.
    """
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    rows = [llm.rows_of(list(prompt), params)[0] for prompt in prompts]
    engine.add(rows)
    inner = real = engine.proposer
    if scripted is not None and mode.draft_len:
        acceptance, outputs = scripted
        inner = ScriptedProposer(oracle_script(outputs, rows, acceptance, llm.model.config.vocab_size, seed=0))
    timed = TimedProposer(inner)
    engine.proposer = timed
    result = Measurement(mode.name, len(rows))
    forwards = 0
    while engine.has_work:
        all_decode = len(engine.scheduler.running) == len(rows) and all(row.is_decoding for row in rows)
        before, forwards_before = sum(row.num_tokens for row in rows), getattr(inner, "num_forwards", 0)
        propose_before, start = timed.seconds, time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
        result.positions.append([row.num_tokens for row in rows])
        if all_decode:
            result.tokens += sum(row.num_tokens for row in rows) - before
            result.seconds += seconds
            result.propose_seconds += timed.seconds - propose_before
            result.step_ms.append(seconds * 1e3)
            forwards += getattr(inner, "num_forwards", 0) - forwards_before
    engine.proposer = real
    num_steps = max(1, len(result.step_ms))
    result.tokens_per_forward = result.tokens / (len(rows) * num_steps)
    result.mtp_forwards_per_step = forwards / num_steps
    totals = [row.stats for row in rows]
    places = max((len(stats.drafted_at) for stats in totals), default=0)
    for place in range(places):
        drafted = sum(stats.drafted_at[place] for stats in totals if place < len(stats.drafted_at))
        accepted = sum(stats.accepted_at[place] for stats in totals if place < len(stats.accepted_at))
        result.acceptance.append(accepted / drafted)
    result.outputs = [tuple(row.output_token_ids) for row in rows]
    return result
