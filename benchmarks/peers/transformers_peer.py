"""Speed of transformers' DeepseekV4ForCausalLM: rows of one length, greedy, with its own cache.

    python benchmarks/peers/transformers_peer.py DIR/hf -b 1,8,32,128 [--prompt-lens 256,2048] [--dtype float32]

Rows of one length need no padding, so what it computes is right; it has no speculation for this model. Prints a JSON
object per figure, see common.py.
"""

from __future__ import annotations

import time

import torch
from common import Work, decode_figures, prompts, read_work, report
from transformers import DeepseekV4ForCausalLM


@torch.inference_mode()
def decode(model, work: Work, batch: int) -> dict:
    """Prefill, then single-token steps."""
    prompt = torch.tensor(prompts(batch, work.prompt_len))
    started = time.perf_counter()
    output = model(prompt, use_cache=True, logits_to_keep=1)
    prefill_seconds, steps = time.perf_counter() - started, []
    for _ in range(work.max_tokens):
        tokens = output.logits[:, -1].argmax(-1, keepdim=True)
        started = time.perf_counter()
        output = model(tokens, use_cache=True, past_key_values=output.past_key_values)
        steps.append(time.perf_counter() - started)
    return decode_figures(batch, work.prompt_len, prefill_seconds, steps)


@torch.inference_mode()
def prefill(model, length: int) -> float:
    """Seconds of one prompt in one forward."""
    prompt = torch.tensor(prompts(1, length))
    started = time.perf_counter()
    model(prompt, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - started


def main() -> None:
    """Command line."""
    work = read_work(__doc__)
    model = DeepseekV4ForCausalLM.from_pretrained(work.checkpoint, dtype=getattr(torch, work.dtype)).eval()
    report("transformers", work, lambda batch: decode(model, work, batch), lambda length: prefill(model, length))


if __name__ == "__main__":
    main()
