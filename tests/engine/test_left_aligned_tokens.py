"""Tokens at the `left_aligned` layout: measured, reported, and different from alone only at near ties.

Its order of reduction depends on the rows beside it, so equality is not promised. What is: where a token differs from
the request alone, the two tokens' log-probabilities are no further apart than rounding moves them.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from speculation_support import assert_ragged, model_of, oracle
from test_speculation_random import Case, demo_cases, demo_model, random_cases, random_run

from polytempo.llm import DEMO_MODEL
from polytempo.tokenizer import Tokenizer
from polytempo.types import SamplingParams

pytestmark = pytest.mark.twin  # the kernels know the ring without a caller's mask; in torch all of it is compared

NUM_LOGPROBS = 5


@dataclass
class Comparison:
    """Tokens before the first difference of each row, the gaps there, and how far log-probabilities moved elsewhere."""

    counts: Counter = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)
    moved: float = 0.0

    def add(self, row, alone) -> None:
        """Compare one row up to and including its first difference."""
        self.counts["rows"] += 1
        self.counts["tokens"] += len(row.output_token_ids)
        pairs = zip(row.output_token_ids, alone.output_token_ids, row.logprobs, alone.logprobs, strict=True)
        for ours, theirs, got, expected in pairs:
            shared = got.keys() & expected.keys()
            self.moved = max([self.moved, *(abs(got[t].logprob - expected[t].logprob) for t in shared)])
            if ours != theirs:
                assert ours in expected, f"token {ours} is not among the {NUM_LOGPROBS} likeliest alone"
                self.gaps.append(expected[theirs].logprob - expected[ours].logprob)
                return
            self.counts["equal"] += 1
        self.counts["equal rows"] += 1


def greedy(cases: list[Case]) -> list[Case]:
    """The same prompts, greedy and with log-probabilities: a tie of a sampled token would hide in its noise."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=NUM_LOGPROBS)
    return [Case(case.prompt, replace(params, max_tokens=case.params.max_tokens)) for case in cases]


def compare(model, cases, seed: int, max_rows: int, tokenizer=None, **options) -> Comparison:
    rows, steps = random_run(model, cases, seed, max_rows, tokenizer, kv_layout="left_aligned", **options)
    assert_ragged(steps, ratios=(4,))
    comparison = Comparison()
    for case, row in rows:
        alone = oracle(model, case.prompt, case.params, tokenizer)
        if len(row.output_token_ids) == len(alone.output_token_ids):
            comparison.add(row, alone)
    assert comparison.counts["rows"] >= len(cases) * 2 // 3
    assert comparison.moved > 0, "no bit moved: the fixture has no leads"
    # Both tokens' log-probabilities may have moved, towards each other.
    assert max(comparison.gaps, default=0.0) <= 2 * comparison.moved
    return comparison


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_differences_are_near_ties(dtype):
    cases = greedy(random_cases(seed=3, count=10, max_tokens=(20, 40)))
    comparison = compare(model_of(dtype=dtype), cases, seed=0, max_rows=6)
    if dtype == torch.float32:
        assert comparison.moved < 1e-3 and comparison.counts["equal"] == comparison.counts["tokens"]
    else:
        assert comparison.counts["equal"] > 0.5 * comparison.counts["tokens"]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_left_aligned_tokens_of_the_demo_model(dtype, capsys):
    """The figures of docs/exactness.md."""
    tokenizer, total = Tokenizer.from_dir(DEMO_MODEL), Comparison()
    cases = greedy(demo_cases(tokenizer, 16))
    for place, (max_rows, count) in enumerate(((8, 16), (32, 64), (64, 96))):
        chosen = [replace(cases[number % len(cases)]) for number in range(count)]
        one = compare(demo_model(dtype), chosen, 60 + place, max_rows, tokenizer, own_drafts=True)
        total.counts += one.counts
        total.gaps += one.gaps
        total.moved = max(total.moved, one.moved)
    with capsys.disabled():
        print(f"\nleft_aligned, {dtype}: {dict(total.counts)}, largest gap {max(total.gaps, default=0.0):.4f}, "
              f"log-probabilities moved by up to {total.moved:.4f}")  # fmt: skip
    oracle.cache_clear()
