"""What the engines' scripts share: options, prompts, and one JSON object per figure. Imports no engine."""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
from collections.abc import Callable
from dataclasses import dataclass

VOCAB_SIZE = 4096  # of make_checkpoint.py
CAUGHT = (RuntimeError, MemoryError, ValueError, TypeError, OSError)


@dataclass(frozen=True)
class Work:
    """What to measure.

    Attributes:
        checkpoint: directory or file in the engine's form.
        batches: rows at once, for decoding.
        prompt_len: tokens of every prompt of a batch.
        max_tokens: decode steps.
        prompt_lens: prompts of one row, for prefill alone.
        dtype: "bfloat16" or "float32".
        mode: "none"; of polytempo also "auto", with drafts, and "packed", weights as the checkpoint stores them.
        threads: for engines that do not take the number from OMP_NUM_THREADS; None leaves it to them.
        eager: of an engine that compiles its layers, that it does not.
    """

    checkpoint: str
    batches: tuple[int, ...]
    prompt_len: int
    max_tokens: int
    prompt_lens: tuple[int, ...]
    dtype: str
    mode: str
    threads: int | None
    eager: bool = False


def read_work(description: str) -> Work:
    """The command line of an engine's script; limits this process's memory if asked to."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("-b", "--batch", default="1,8,32,128")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--prompt-lens", default="")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--mode", choices=["none", "packed", "auto"], default="none")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--eager", action="store_true", help="do not compile, for engines that do")
    parser.add_argument("--memory-gib", type=float, help="most memory that this process may take")
    options = parser.parse_args()
    if options.memory_gib:
        limit = int(options.memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    numbers = [tuple(int(part) for part in text.split(",") if part) for text in (options.batch, options.prompt_lens)]
    return Work(options.checkpoint, numbers[0], options.prompt_len, options.max_tokens, numbers[1], options.dtype,
                options.mode, options.threads, options.eager)  # fmt: skip


def prompts(batch: int, length: int) -> list[list[int]]:
    """Random token ids, the same for every engine."""
    generator = random.Random(f"{batch} {length}")
    return [[generator.randrange(2, VOCAB_SIZE) for _ in range(length)] for _ in range(batch)]


def decode_figures(batch: int, prompt_len: int, prefill_seconds: float, step_seconds: list[float]) -> dict:
    """Figures of a batch whose rows all gain one token per step; the median step counts."""
    step = statistics.median(step_seconds)
    return {"tokens_per_second": round(batch / step, 1), "step_ms": round(step * 1e3, 2),
            "prefill_tokens_per_second": round(batch * prompt_len / prefill_seconds, 1)}  # fmt: skip


def report(
    engine: str, work: Work, decode: Callable[[int], dict], prefill: Callable[[int], float], dtype: str | None = None
) -> None:
    """Measure and print a JSON object per figure, at once: who reads them may end this process when it has enough.

    Args:
        engine: name in the table.
        work: what to measure.
        decode: batch -> figures as of `decode_figures`.
        prefill: prompt tokens of one row -> seconds up to its first token.
        dtype: what the engine really computes with, if not the work's.
    """
    labels = {"engine": engine, "dtype": dtype or work.dtype, "mode": work.mode}
    for batch in work.batches:
        _print({**labels, "kind": "decode", "size": batch}, lambda batch=batch: decode(batch))
    for length in work.prompt_lens:
        _print({**labels, "kind": "prefill", "size": length},
               lambda length=length: {"prefill_tokens_per_second": round(length / prefill(length), 1)})  # fmt: skip


def _print(labels: dict, measure: Callable[[], dict]) -> None:
    try:
        figures = measure()
    except CAUGHT as error:
        figures = {"failed": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"}
    print(json.dumps({**labels, **figures}), flush=True)
