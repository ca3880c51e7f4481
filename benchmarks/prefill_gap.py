"""How long rows wait for their next token while a 4,000-token prompt enters, by `mixed_prompt_tokens`.

Run: taskset -c 0 env OMP_NUM_THREADS=1 python benchmarks/prefill_gap.py

Gaps are of the other rows, from one step that brought a row tokens to the next. Their median is taken before the prompt
came, the longest while it enters; the ratio should not exceed 3 at the server's default of 64. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch

from polytempo import LLM, SamplingParams
from polytempo.engine_config import KERNELS

PROMPT_LEN = 4000


def gaps(llm: LLM, num_rows: int, budget: int | None) -> dict[str, float]:
    """One run: rows decode, the long prompt enters after 20 steps, and the run ends with its first token."""
    engine = llm.engine
    engine.scheduler.config = replace(engine.config, mixed_prompt_tokens=budget)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=None, ignore_eos=True)
    rows = [llm.rows_of({"prompt_token_ids": [0, 5 + place]}, params)[0] for place in range(num_rows)]
    long = llm.rows_of({"prompt_token_ids": [0] + [7 + i % 900 for i in range(PROMPT_LEN - 1)]}, params)[0]
    for row in rows:
        engine.add([row])
    last, seen, before, during, step = {}, {}, [], [], 0
    while not long.output_token_ids:
        if step == 20:
            engine.add([long])
            started = time.perf_counter()
        engine.step()
        step += 1
        now = time.perf_counter()
        for row in rows:
            if len(row.output_token_ids) > seen.get(id(row), 0):
                if id(row) in last and step > 3:
                    (before if step <= 20 else during).append(now - last[id(row)])
                last[id(row)], seen[id(row)] = now, len(row.output_token_ids)
    for row in (*rows, long):
        engine.abort(row.request.request_id)
    alone, between, longest = statistics.median(before), statistics.median(during), max(during)
    return {"mixed_prompt_tokens": budget, "median_before_ms": 1e3 * alone, "median_during_ms": 1e3 * between,
            "longest_during_ms": 1e3 * longest, "longest_to_median_before": longest / alone,
            "longest_to_median_during": longest / between, "prompt_ttft_s": now - started}  # fmt: skip


def sentence(result: dict[str, float]) -> str:
    """A run in words."""
    return (
        f"{result['mixed_prompt_tokens']:>4} prompt tokens per step: longest gap {result['longest_during_ms']:.1f} ms, "
        f"{result['longest_to_median_before']:.2f} times the median before ({result['median_before_ms']:.1f} ms), "
        f"{result['longest_to_median_during']:.2f} times that of the run ({result['median_during_ms']:.1f} ms); "
        f"the prompt's first token after {result['prompt_ttft_s']:.1f} s"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--budgets", default="16,32,64,128,256")
    parser.add_argument("--draft-len", type=int, default=2)
    parser.add_argument("--kernels", choices=KERNELS, default="native", help="Refused if not to be had.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM(max_rows=options.rows + 1, max_model_len=4608, draft_len=options.draft_len,
              kernels=options.kernels, progress=False)  # fmt: skip
    results = [gaps(llm, options.rows, int(budget)) for budget in options.budgets.split(",")]
    for result in results:
        print(sentence(result), flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
