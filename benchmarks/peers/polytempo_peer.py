"""Speed of polytempo in the shape of the peers' measurements: rows of one length, greedy.

    python benchmarks/peers/polytempo_peer.py DIR/official -b 1,8,32,128 [--prompt-lens 256,2048] [--mode auto]

Prints a JSON object per figure, see common.py.
"""

from __future__ import annotations

import time

from common import Work, decode_figures, prompts, read_work, report

from polytempo import LLM, SamplingParams


def decode(base: LLM, work: Work, batch: int) -> dict:
    """Prefill, then steps in which all rows decode; with drafts, all their tokens over all their seconds."""
    llm = LLM.from_model(
        base.model, None, max_rows=batch, max_model_len=work.prompt_len + work.max_tokens + 8,
        speculate="auto" if work.mode == "auto" else "none",
        # All prompts in one step: the first rows would otherwise be done before the last ones start.
        max_step_tokens=max(1024, batch * work.prompt_len),
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=work.max_tokens + 1, ignore_eos=True)
    rows = [llm.rows_of(prompt, params)[0] for prompt in prompts(batch, work.prompt_len)]
    llm.engine.add(rows)
    started = time.perf_counter()
    while not all(row.is_decoding for row in rows):
        llm.engine.step()
    prefill_seconds, steps, gained = time.perf_counter() - started, [], 0
    while not any(row.is_finished for row in rows):
        count, started = sum(row.num_tokens for row in rows), time.perf_counter()
        llm.engine.step()
        steps.append(time.perf_counter() - started)
        gained += sum(row.num_tokens for row in rows) - count
    figures = decode_figures(batch, work.prompt_len, prefill_seconds, steps)
    if work.mode == "auto":
        figures["tokens_per_second"] = round(gained / sum(steps), 1)
    return figures


def prefill(base: LLM, length: int) -> float:
    """Seconds of one prompt up to its first token."""
    llm = LLM.from_model(base.model, None, max_rows=1, max_model_len=length + 2, speculate="none")
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts(1, length), params, progress=False)
    return time.perf_counter() - started


def main() -> None:
    """Command line."""
    work = read_work(__doc__)
    weights = "expanded" if work.mode == "none" else "packed"
    base = LLM(
        work.checkpoint, work.dtype, tokenizer=False, weights=weights, max_rows=1, max_model_len=64, progress=False
    )
    report("polytempo", work, lambda batch: decode(base, work, batch), lambda length: prefill(base, length))


if __name__ == "__main__":
    main()
