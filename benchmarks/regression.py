"""Whole engine steps on the C++ kernels against the torch path, as ratios, compared with the last committed ones.

    python benchmarks/regression.py [--rows 1,8,32] [--save]

The demo model without drafts; both paths take turns in one process, and the median of REPEAT runs counts, so a ratio
survives a slow or busy machine better than a time does. Tokens of two runs of one path must be equal. A ratio below
ALARM of the committed one is an error (exit code 1). --save writes benchmarks/ratios.json. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

from polytempo.bench.run import Mode, measure
from polytempo.bench.workload import prompts
from polytempo.llm import LLM

COMMITTED = Path(__file__).with_name("ratios.json")
PROMPT_LENS, MAX_TOKENS, REPEAT, ALARM = (32, 100, 64, 200), 24, 3, 0.7


def step_ms(base: LLM, kernels: str, rows: int) -> tuple[float, list]:
    """Median step, and what was emitted."""
    llm = LLM.from_model(
        base.model, base.tokenizer, max_rows=rows, max_model_len=max(PROMPT_LENS) + MAX_TOKENS, speculate="none",
        kernels=kernels,
    )  # fmt: skip
    work = prompts(base.tokenizer, base.model.config.vocab_size, PROMPT_LENS, rows, seed=0)
    result = measure(llm, Mode(0), [work], MAX_TOKENS)
    return statistics.median(result.step_ms), result.outputs


def ratio(base: LLM, rows: int) -> float:
    """torch ms / C++ ms."""
    times: dict[str, list[float]] = {"torch": [], "native": []}
    outputs: dict[str, list] = {}
    for _ in range(REPEAT):
        for kernels, taken in times.items():
            milliseconds, tokens = step_ms(base, kernels, rows)
            taken.append(milliseconds)
            if outputs.setdefault(kernels, tokens) != tokens:
                sys.exit(f"{kernels} at {rows} rows: two runs emitted other tokens")
    return statistics.median(times["torch"]) / statistics.median(times["native"])


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    base = LLM(progress=False, weights="expanded")
    found = {rows: round(ratio(base, int(rows)), 2) for rows in options.rows.split(",")}
    committed = json.loads(COMMITTED.read_text())["ratios"] if COMMITTED.exists() else {}
    for rows, value in found.items():
        print(f"{rows:>4} rows: C++ {value:.2f} times as fast as torch; committed {committed.get(rows, 'nothing')}")
    slower = [rows for rows, value in found.items() if value < ALARM * committed.get(rows, 0.0)]
    if options.save:
        record = {"ratios": found, "threads": torch.get_num_threads(), "torch": torch.__version__}
        COMMITTED.write_text(json.dumps(record) + "\n")
    print(json.dumps({"ratios": found, "committed": committed, "slower": slower}))
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
