"""Rows of one batch under scripts that say how many of their drafts are right, each held against itself alone."""

from __future__ import annotations

from speculation_support import GREEDY, Script, begins_like, drive, make_llm, model_of, oracle, prompt_of, row_of

from polytempo.types import FinishReason, SamplingParams

ROTATING = ((0, 3, 1, 2), (3, 0, 2, 1), (1, 2, 3, 0), (2, 1, 0, 3))
"""Right drafts of the four rows, step by step."""


def run_scripted(lengths, patterns, params=GREEDY, max_tokens=200, model=None, **options):
    """Greedy rows (or `params`) with these prompts under these patterns: (script, steps, rows, their oracles)."""
    model = model_of() if model is None else model
    llm = make_llm(model, **options)
    script = Script().install(llm)
    every = [params] * len(lengths) if isinstance(params, SamplingParams) else params
    rows, expected = [], []
    for length, pattern, one in zip(lengths, patterns, every, strict=True):
        alone = oracle(model, prompt_of(length), one)
        options = {name: getattr(one, name) for name in ("temperature", "top_p", "seed")}
        count = min(max_tokens, one.max_tokens)
        short = SamplingParams(**options, max_tokens=count, ignore_eos=True, logprobs=2)
        row = row_of(llm, prompt_of(length), short)
        rows.append(script.add(row, alone.output_token_ids, pattern))
        expected.append(alone)
        llm.engine.add([row])
    steps = drive(llm)
    for row, alone in zip(rows, expected, strict=True):
        count = row.request.params.max_tokens
        assert len(row.output_token_ids) == count and row.finish_reason is FinishReason.LENGTH
        assert begins_like(row, alone), f"prompt of {len(row.request.prompt_token_ids)} tokens"
    return script, steps, rows, expected
