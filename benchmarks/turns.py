"""Draft lengths against each other, in turns of a few steps: what a machine that changes its pace hits, hits all.

Runs one after another differ by a tenth and more where others share the machine. Here every mode has an engine of its
own on the same prompts and weights; in turns each emits some tokens per row, and only its own steps are counted, while
all of its rows decode. Fails if their tokens differ.
Worth most on a machine with nothing else running: `OMP_NUM_THREADS=2 python benchmarks/turns.py --threads 2`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from polytempo import LLM, SamplingParams
from polytempo.bench.workload import prompts
from polytempo.engine.row import Row
from polytempo.engine_config import WEIGHTS
from polytempo.llm import DEMO_MODEL

PROMPT_LENS = (32, 100, 64, 200)
TURN = 32
"""Tokens per row that a mode emits before the next has its turn."""


@dataclass
class Runner:
    """One mode at work.

    Attributes:
        llm: its engine.
        rows: one per prompt.
        seconds: of the counted steps.
        tokens: that they emitted.
    """

    llm: LLM
    rows: list[Row]
    seconds: float = 0.0
    tokens: int = 0

    def read_prompts(self) -> None:
        """Step until every row decodes."""
        self.llm.engine.add(self.rows)
        while not all(row.is_decoding for row in self.rows):
            self.llm.engine.step()

    def take_turn(self) -> None:
        """Emit TURN tokens per row, counted unless a row ends."""
        wanted = self._emitted() + TURN * len(self.rows)
        while self._emitted() < wanted and self.llm.engine.has_work:
            before, start = self._emitted(), time.perf_counter()
            self.llm.engine.step()
            seconds = time.perf_counter() - start
            if not any(row.is_finished for row in self.rows):
                self.seconds += seconds
                self.tokens += self._emitted() - before

    def _emitted(self) -> int:
        return sum(len(row.output_token_ids) for row in self.rows)


def run_turns(base: LLM, batch: int, modes: list[str], max_tokens: int, seed: int) -> dict[str, float]:
    """Tokens per second of each mode, over one batch."""
    work = prompts(base.tokenizer, base.model.config.vocab_size, PROMPT_LENS, batch, seed)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    runners = {}
    for mode in modes:
        draft_len = mode if mode == "auto" else int(mode)
        llm = LLM.from_model(
            base.model, base.tokenizer, max_rows=batch, max_model_len=max(PROMPT_LENS) + max_tokens,
            speculate="mtp" if draft_len else "none", draft_len=draft_len, max_step_tokens=max(1024, batch * 8),
        )  # fmt: skip
        runners[mode] = Runner(llm, [llm.rows_of(list(prompt), params)[0] for prompt in work])
        runners[mode].read_prompts()
    while any(runner.llm.engine.has_work for runner in runners.values()):
        for runner in runners.values():
            runner.take_turn()
    outputs = [[row.output_token_ids for row in runner.rows] for runner in runners.values()]
    if any(output != outputs[0] for output in outputs):
        sys.exit(f"modes emitted different tokens at {batch} rows, seed {seed}")
    return {mode: runner.tokens / runner.seconds for mode, runner in runners.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("-b", "--batches", default="1,4,8,16,32,64,128")
    parser.add_argument("--draft-lens", default="0,1,2,3,auto", help="the first is what the others are compared with")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=8, help="batches per size, of different prompts")
    parser.add_argument("--weights", choices=WEIGHTS, default="auto")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own)")
    parser.add_argument("--out", type=Path, help="write results as JSON")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    base = LLM(options.model, weights=options.weights, progress=False)
    modes, results = options.draft_lens.split(","), []
    batches = [int(batch) for batch in options.batches.split(",")]
    bar = tqdm(total=len(batches) * options.repeat, unit="batch", disable=None)
    for batch in batches:
        runs = []
        for seed in range(options.repeat):
            runs.append(run_turns(base, batch, modes, options.max_tokens, seed))
            bar.update()
        results.append({"rows": batch, "runs": runs, **summary(runs, modes)})
        bar.write(json.dumps({key: value for key, value in results[-1].items() if key != "runs"}))
    bar.close()
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


def summary(runs: list[dict[str, float]], modes: list[str]) -> dict[str, object]:
    """Median tokens per second of each mode, and its ratio to the first: mean over batches and its standard error."""
    first, ratios = modes[0], {}
    for mode in modes[1:]:
        ratio = [run[mode] / run[first] for run in runs]
        error = statistics.stdev(ratio) / len(ratio) ** 0.5 if len(ratio) > 1 else 0.0
        ratios[mode] = [round(statistics.mean(ratio), 3), round(error, 3)]
    speeds = {mode: round(statistics.median(run[mode] for run in runs)) for mode in modes}
    return {"tokens_per_second": speeds, f"ratio_to_{first}": ratios}


if __name__ == "__main__":
    main()
