"""Decode speed of polytempo in the shape of the peers' measurements: rows of one length, greedy.

    python benchmarks/peers/polytempo_peer.py DIR/official -b 1,8,32,128 [--prompt-len 256] [--max-tokens 32]

The last line is JSON, as `transformers_peer.py` prints it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from polytempo import LLM, SamplingParams


def measure(base: LLM, batch: int, prompt_len: int, max_tokens: int) -> dict:
    """Prefill, then steps in which all rows decode; the median step counts."""
    llm = LLM.from_model(
        base.model, None, max_rows=batch, max_model_len=prompt_len + max_tokens + 1, speculate="none",
        # All prompts in one step: the first rows would otherwise be done before the last ones start.
        max_step_tokens=max(1024, batch * prompt_len),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(2, base.model.config.vocab_size, (batch, prompt_len), generator=generator).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens + 1, ignore_eos=True)
    rows = [llm.rows_of(prompt, params)[0] for prompt in prompts]
    llm.engine.add(rows)
    started = time.perf_counter()
    while not all(row.is_decoding for row in rows):
        llm.engine.step()
    prefill, steps = time.perf_counter() - started, []
    while llm.engine.has_work:
        count = sum(row.num_tokens for row in rows)
        started = time.perf_counter()
        llm.engine.step()
        seconds = time.perf_counter() - started
        if sum(row.num_tokens for row in rows) - count == batch:
            steps.append(seconds)
    step = statistics.median(steps)
    return {
        "engine": "polytempo", "batch": batch, "tokens_per_second": round(batch / step, 1),
        "step_ms": round(step * 1e3, 2), "prefill_tokens_per_second": round(batch * prompt_len / prefill, 1),
    }  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("-b", "--batch", default="1,8,32,128")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args()
    base = LLM(options.checkpoint, "bfloat16", tokenizer=False, max_rows=1, max_model_len=64)
    batches = [int(part) for part in options.batch.split(",")]
    print(json.dumps([measure(base, batch, options.prompt_len, options.max_tokens) for batch in batches]))


if __name__ == "__main__":
    main()
