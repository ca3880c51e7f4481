"""Speed of vLLM's CPU build through its `LLM`: rows of one length, greedy.

    python benchmarks/peers/vllm_peer.py DIR/bf16 -b 1,8,32,128 [--prompt-lens 256,2048] [--dtype bfloat16]

A step is what max_tokens tokens take longer than one token, over their number less one, since `LLM.generate` shows no
steps. Prefixes are not reused. Prints a JSON object per figure, see common.py.
"""

from __future__ import annotations

import os
import time

from common import Work, prompts, read_work, report

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams  # noqa: E402  reads its environment when it is imported
from vllm.triton_utils import HAS_TRITON  # noqa: E402

WARMTH_TOKENS = 2


def seconds_of(llm: LLM, ids: list[list[int]], max_tokens: int) -> float:
    """One call of generate."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in ids], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    if any(len(output.outputs[0].token_ids) != max_tokens for output in outputs):
        raise RuntimeError(f"vLLM did not return {max_tokens} tokens for every prompt")
    return seconds


def decode(llm: LLM, work: Work, batch: int) -> dict:
    """Prefill, and steps by difference."""
    ids = prompts(batch, work.prompt_len)
    one = seconds_of(llm, ids, 1)
    step = (seconds_of(llm, ids, work.max_tokens + 1) - one) / work.max_tokens
    return {"tokens_per_second": round(batch / step, 1), "step_ms": round(step * 1e3, 2),
            "prefill_tokens_per_second": round(batch * work.prompt_len / one, 1)}  # fmt: skip


def main() -> None:
    """Command line."""
    work = read_work(__doc__)
    longest = max((work.prompt_len, *work.prompt_lens)) + work.max_tokens + 2
    try:
        llm = LLM(
            work.checkpoint, skip_tokenizer_init=True, dtype=work.dtype, max_model_len=longest,
            max_num_seqs=max(work.batches), enforce_eager=True, enable_prefix_caching=False,
        )  # fmt: skip
        seconds_of(llm, prompts(1, 16), WARMTH_TOKENS)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        triton = "" if HAS_TRITON else "; vLLM finds no Triton with a CPU backend here"
        raise SystemExit(f"vLLM does not start: {reason}{triton}") from None
    report("vllm", work, lambda batch: decode(llm, work, batch), lambda length: seconds_of(llm, prompts(1, length), 1))


if __name__ == "__main__":
    main()
