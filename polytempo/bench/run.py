"""Time decode steps of one mode: only steps in which every row of the batch decodes count."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from polytempo.device import describe_device
from polytempo.engine.propose import ScriptedProposer
from polytempo.engine.row import Row
from polytempo.engine.stats import DraftStats, StepSeconds
from polytempo.llm import LLM
from polytempo.types import SamplingParams


@dataclass(frozen=True)
class Mode:
    """One way to decode.

    Attributes:
        draft_len: drafts per row and step, or "auto"; 0 does not speculate.
        kv_advance: "per_sequence" or "cohort".
        kv_layout: "ring" or "left_aligned".
    """

    draft_len: int | str
    kv_advance: str = "per_sequence"
    kv_layout: str = "ring"

    @property
    def name(self) -> str:
        """Short label for tables."""
        name = f"mtp-{self.draft_len}" if self.draft_len else "none"
        if self.kv_advance != "per_sequence":
            name += f"-{self.kv_advance}"
        return name if self.kv_layout == "ring" else f"{name}-{self.kv_layout}"

    @property
    def is_exact(self) -> bool:
        """Whether its tokens must equal those of every other exact mode."""
        return self.kv_layout == "ring"

    @property
    def speculate(self) -> str:
        """The engine option."""
        return "mtp" if self.draft_len else "none"


@dataclass
class Measurement:
    """What one mode did with one batch.

    Attributes:
        mode: how it decoded.
        dtype: of the weights.
        threads: torch threads.
        batch: rows.
        device: its name.
        tokens: emitted in the timed steps.
        seconds: of the timed steps.
        phases: of them, by phase of the step.
        step_ms: each timed step.
        tokens_per_forward: tokens of all rows / (rows · timed steps).
        acceptance: accepted / drafted by place in the run.
        mtp_forwards_per_step: whole-block forwards of the proposer per timed step.
        positions: per step of the first batch, every row's number of tokens, for the picture.
        outputs: every row's output tokens.
    """

    mode: Mode
    dtype: str
    threads: int
    batch: int
    device: str = "cpu"
    tokens: int = 0
    seconds: float = 0.0
    phases: StepSeconds = field(default_factory=StepSeconds)
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
    rounds: Sequence[Sequence[Sequence[int]]],
    max_tokens: int,
    scripted: tuple[float, Sequence[Sequence[int]]] | None = None,
) -> Measurement:
    """Decode batches one after another, as an engine that lives on does.

    Args:
        llm: with at least as many rows as the widest batch has prompts, built for this mode's options.
        mode: label and draft length.
        rounds: batches of equally many prompts, one per row.
        max_tokens: output tokens per row.
        scripted: (acceptance, the outputs of all batches) replaces the MTP block by drafts that are right that often.

    Returns:
        The measurement.
    """
    batch = len(rounds[0])
    dtype = str(llm.model.dtype).removeprefix("torch.")
    result = Measurement(mode, dtype, torch.get_num_threads(), batch, describe_device(llm.model.device))
    totals, forwards = DraftStats(), 0
    for place, prompts in enumerate(rounds):
        of_round = None
        if scripted is not None:
            of_round = scripted[0], scripted[1][place * batch : (place + 1) * batch]
        forwards += _decode(llm, result, totals, prompts, max_tokens, of_round)
    num_steps = max(1, len(result.step_ms))
    result.tokens_per_forward = result.tokens / (batch * num_steps)
    result.mtp_forwards_per_step = forwards / num_steps
    result.acceptance = totals.acceptance_by_place
    return result


def _decode(
    llm: LLM,
    result: Measurement,
    totals: DraftStats,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    scripted: tuple[float, Sequence[Sequence[int]]] | None,
) -> int:
    """Decode one batch, adding to the result and totals; returns the proposer's forwards in the timed steps."""
    engine, mode = llm.engine, result.mode
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    rows = [llm.rows_of(list(prompt), params)[0] for prompt in prompts]
    engine.add(rows)
    real = engine.proposer
    if scripted is not None and mode.draft_len:
        acceptance, outputs = scripted
        script = oracle_script(outputs, rows, acceptance, llm.model.config.vocab_size, seed=0)
        engine.proposer = ScriptedProposer(script)
    forwards, is_first = 0, not result.positions
    while engine.has_work:
        all_decode = len(engine.scheduler.running) == len(rows) and all(row.is_decoding for row in rows)
        before, forwards_before = sum(row.num_tokens for row in rows), getattr(engine.proposer, "num_forwards", 0)
        engine.seconds, start = StepSeconds(), time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
        if is_first:
            result.positions.append([row.num_tokens for row in rows])
        if all_decode:
            result.tokens += sum(row.num_tokens for row in rows) - before
            result.seconds += seconds
            result.phases.add(engine.seconds)
            result.step_ms.append(seconds * 1e3)
            forwards += getattr(engine.proposer, "num_forwards", 0) - forwards_before
    engine.proposer = real
    for row in rows:
        totals.add(row.stats)
    result.outputs += [tuple(row.output_token_ids) for row in rows]
    return forwards
