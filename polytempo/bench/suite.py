"""All modes at all batch sizes, in one process, on one set of weights per dtype."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from polytempo.bench.profile import Profile, profile
from polytempo.bench.run import Measurement, Mode, measure
from polytempo.bench.workload import prompts
from polytempo.llm import LLM


@dataclass(frozen=True)
class Suite:
    """What to measure; fields are the options of `polytempo bench`."""

    model_dir: Path | None = None
    dtypes: Sequence[str] = ("auto",)
    batches: Sequence[int] = (1, 8, 32)
    draft_lens: Sequence[int | str] = (0, 1, 3, "auto")
    kv_advances: Sequence[str] = ("per_sequence",)
    kv_layouts: Sequence[str] = ("ring",)
    prompt_lens: Sequence[int] = (32, 200, 64, 400)
    max_tokens: int = 64
    scripted_acceptance: float | None = None
    rounds: int = 1
    repeat: int = 1
    threads: Sequence[int] = ()
    seed: int = 0
    kernels: str = "auto"
    weights: str = "auto"
    device: str = "cpu"

    def modes(self) -> list[Mode]:
        """Every draft length by every advance mode and layout; no drafts on the first layout first, as the reference.

        Without drafts all advance modes are one.
        """
        lengths = [0, *(length for length in self.draft_lens if length != 0)]
        modes = []
        for layout in self.kv_layouts:
            for length in lengths:
                advances = self.kv_advances if length else ("per_sequence",)
                modes += [Mode(length, advance, layout) for advance in advances]
        return modes

    @property
    def num_runs(self) -> int:
        """How often a batch is decoded."""
        settings = len(self.dtypes) * max(1, len(self.threads)) * len(self.batches)
        return settings * len(self.modes()) * self.repeat


def run_suite(suite: Suite) -> list[Measurement]:
    """Measure every mode at every dtype, thread count and batch size, `repeat` times.

    Modes take turns, so that a machine that slows down slows all of them; of each mode's runs the one of median
    throughput is kept.

    Args:
        suite: what to measure.

    Returns:
        Measurements in order of dtype, threads and batch, the undrafted mode first.

    Raises:
        CheckpointError, ConfigError, RequestError: as LLM.
    """
    results = []
    with tqdm(total=suite.num_runs, unit="run", desc="bench") as bar:
        for dtype in suite.dtypes:
            base = _load(suite, dtype)
            for threads in suite.threads or (torch.get_num_threads(),):
                torch.set_num_threads(threads)
                for batch in suite.batches:
                    results += _measure_batch(suite, base, batch, bar)
    return results


def _load(suite: Suite, dtype: str) -> LLM:
    """The weights in a dtype, in an LLM whose kernels are named so that they are refused before a file is read."""
    layout = "ring" if set(suite.kv_layouts) == {"ring"} else "left_aligned"
    return LLM(suite.model_dir, dtype, suite.device, weights=suite.weights, kernels=suite.kernels, kv_layout=layout)


def _measure_batch(suite: Suite, base: LLM, batch: int, bar: tqdm) -> Iterator[Measurement]:
    count = batch * suite.rounds
    work = prompts(base.tokenizer, base.model.config.vocab_size, suite.prompt_lens, count, suite.seed)
    rounds = [work[start : start + batch] for start in range(0, count, batch)]
    runs: dict[Mode, list[Measurement]] = {mode: [] for mode in suite.modes()}
    scripted = None
    for _ in range(suite.repeat):
        for mode, mode_runs in runs.items():
            llm = _engine(suite, base, mode, batch)
            mode_runs.append(measure(llm, mode, rounds, suite.max_tokens, scripted))
            if suite.scripted_acceptance is not None and scripted is None:
                scripted = suite.scripted_acceptance, mode_runs[0].outputs
            bar.update()
    for mode_runs in runs.values():
        mode_runs.sort(key=lambda run: run.tokens_per_second)
        yield mode_runs[statistics.median_low(range(len(mode_runs)))]


def _engine(suite: Suite, base: LLM, mode: Mode, batch: int) -> LLM:
    most = 0 if isinstance(mode.draft_len, str) else mode.draft_len
    return LLM.from_model(
        base.model, base.tokenizer, max_rows=batch, max_model_len=max(suite.prompt_lens) + suite.max_tokens,
        speculate=mode.speculate, draft_len=mode.draft_len, kv_advance=mode.kv_advance, kv_layout=mode.kv_layout,
        kernels=suite.kernels, max_step_tokens=max(1024, batch * (most + 1)),
    )  # fmt: skip


def profile_suite(suite: Suite) -> list[Profile]:
    """Profile every mode at every batch size, at the first dtype and thread count.

    Args:
        suite: what to profile; of its max_tokens each row decodes until the first one ends.

    Returns:
        In order of batch, then mode.

    Raises:
        CheckpointError, ConfigError, RequestError: as LLM.
    """
    base = _load(suite, suite.dtypes[0])
    if suite.threads:
        torch.set_num_threads(suite.threads[0])
    found = []
    for batch in suite.batches:
        work = prompts(base.tokenizer, base.model.config.vocab_size, suite.prompt_lens, batch, suite.seed)
        for mode in suite.modes():
            found.append(profile(_engine(suite, base, mode, batch), mode, work, suite.max_tokens))
    return found
