"""All modes at all batch sizes, in one process, on one set of weights."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from polytempo.bench.run import Measurement, Mode, measure
from polytempo.bench.workload import prompts
from polytempo.llm import LLM


@dataclass(frozen=True)
class Suite:
    """What to measure; fields are the options of `polytempo bench`."""

    model_dir: Path | None = None
    dtype: str = "auto"
    batches: Sequence[int] = (1, 8, 32)
    draft_lens: Sequence[int] = (0, 1, 3)
    cohort: bool = False
    prompt_lens: Sequence[int] = (32, 200, 64, 400)
    max_tokens: int = 64
    scripted_acceptance: float | None = None
    repeat: int = 1
    threads: int | None = None
    seed: int = 0
    kernels: str = "auto"

    def modes(self) -> list[Mode]:
        """Every draft length per sequence, then by cohort if asked; no drafts first, as the reference."""
        lengths = sorted({0, *self.draft_lens})
        modes = [Mode(length) for length in lengths]
        return modes + [Mode(length, "cohort") for length in lengths if length and self.cohort]


def run_suite(suite: Suite) -> list[Measurement]:
    """Measure every mode at every batch size, `repeat` times; the run of median throughput is kept.

    Args:
        suite: what to measure.

    Returns:
        Measurements in order of batch, the undrafted mode first.

    Raises:
        CheckpointError, ConfigError, RequestError: as LLM.
    """
    if suite.threads:
        torch.set_num_threads(suite.threads)
    base = LLM(suite.model_dir, suite.dtype)
    limit = max(suite.prompt_lens) + suite.max_tokens
    results = []
    with tqdm(total=len(suite.batches) * len(suite.modes()) * suite.repeat, unit="run", desc="bench") as bar:
        for batch in suite.batches:
            work = prompts(base.tokenizer, base.model.config.vocab_size, suite.prompt_lens, batch, suite.seed)
            outputs = None
            for mode in suite.modes():
                runs = []
                for _ in range(suite.repeat):
                    llm = LLM.from_model(
                        base.model, base.tokenizer, max_rows=batch, max_model_len=limit, speculate=mode.speculate,
                        draft_len=mode.draft_len, kv_advance=mode.kv_advance, kernels=suite.kernels,
                        max_step_tokens=max(1024, batch * (mode.draft_len + 1)),
                    )  # fmt: skip
                    scripted = None
                    if suite.scripted_acceptance is not None and outputs is not None:
                        scripted = (suite.scripted_acceptance, outputs)
                    runs.append(measure(llm, mode, work, suite.max_tokens, scripted))
                    bar.update()
                runs.sort(key=lambda run: run.tokens_per_second)
                middle = statistics.median_low(range(len(runs)))
                results.append(runs[middle])
                outputs = outputs or results[-1].outputs
    return results
