"""Decode speed of transformers' DeepseekV4ForCausalLM: rows of one length, greedy, with its own cache.

    python benchmarks/peers/transformers_peer.py DIR/hf -b 1,8,32,128 [--prompt-len 256] [--max-tokens 32]

Rows of one length need no padding, so what it computes is right; it has no speculation for this model. The last line is
JSON: a list of {"engine", "batch", "tokens_per_second", "step_ms", "prefill_tokens_per_second"}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from transformers import DeepseekV4ForCausalLM


@torch.inference_mode()
def measure(model, batch: int, prompt_len: int, max_tokens: int) -> dict:
    """Prefill, then single-token steps; the median step counts."""
    generator = torch.Generator().manual_seed(batch)
    prompt = torch.randint(2, model.config.vocab_size, (batch, prompt_len), generator=generator)
    started = time.perf_counter()
    output = model(prompt, use_cache=True, logits_to_keep=1)
    prefill = time.perf_counter() - started
    steps = []
    for _ in range(max_tokens):
        tokens = output.logits[:, -1].argmax(-1, keepdim=True)
        started = time.perf_counter()
        output = model(tokens, use_cache=True, past_key_values=output.past_key_values)
        steps.append(time.perf_counter() - started)
    step = statistics.median(steps)
    return {
        "engine": "transformers", "batch": batch, "tokens_per_second": round(batch / step, 1),
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
    model = DeepseekV4ForCausalLM.from_pretrained(options.checkpoint, dtype=torch.bfloat16).eval()
    batches = [int(part) for part in options.batch.split(",")]
    print(json.dumps([measure(model, batch, options.prompt_len, options.max_tokens) for batch in batches]))


if __name__ == "__main__":
    main()
