"""How long rows wait for their next token while a 4,000-token prompt enters, by `mixed_prompt_tokens`.

The last line is JSON. Run: python benchmarks/prefill_gap.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from polytempo import LLM, SamplingParams

PROMPT_LEN = 4000


def gaps(llm: LLM, num_rows: int, budget: int | None) -> dict[str, float]:
    """One run: rows decode, the long prompt enters after 20 steps, and the run ends 10 steps after its first token."""
    from dataclasses import replace

    engine = llm.engine
    engine.scheduler.config = replace(engine.config, mixed_prompt_tokens=budget)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=None, ignore_eos=True)
    rows = [llm.rows_of({"prompt_token_ids": [0, 5 + place]}, params)[0] for place in range(num_rows)]
    long = llm.rows_of({"prompt_token_ids": [0] + [7 + i % 900 for i in range(PROMPT_LEN - 1)]}, params)[0]
    for row in rows:
        engine.add([row])
    last, seen, before, per_row, left, started = {}, {}, [], [], None, None
    for step in range(5000):
        if step == 20:
            engine.add([long])
            started = time.perf_counter()
        engine.step()
        now = time.perf_counter()
        for row in rows:
            if len(row.output_token_ids) > seen.get(id(row), 0):
                if id(row) in last and step >= 3:
                    per_row.append(now - last[id(row)])
                    if step < 20:
                        before.append(now - last[id(row)])
                last[id(row)], seen[id(row)] = now, len(row.output_token_ids)
        if long.output_token_ids and left is None:
            left, ttft = step + 10, now - started
        if step == left:
            break
    for row in (*rows, long):
        engine.abort(row.request.request_id)
    median = statistics.median(per_row)
    alone = statistics.median(before)
    return {"mixed_prompt_tokens": budget, "median_ms": 1e3 * median, "median_before_ms": 1e3 * alone,
            "longest_ms": 1e3 * max(per_row), "longest_to_median": max(per_row) / median,
            "longest_to_median_before": max(per_row) / alone, "prompt_ttft_s": ttft}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--budgets", default="16,32,64,128,256")
    parser.add_argument("--draft-len", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM(max_rows=options.rows + 1, max_model_len=4608, draft_len=options.draft_len, progress=False)
    results = [gaps(llm, options.rows, int(budget)) for budget in options.budgets.split(",")]
    for result in results:
        print("  ".join(f"{name} {value:.2f}" for name, value in result.items()), flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
