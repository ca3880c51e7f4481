"""Any drafts for any row at any step, rows that join, leave and are aborted: each equals itself alone, bit for bit."""

import functools
import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from speculation_support import (
    MTPUnderScript,
    Script,
    answer,
    assert_ragged,
    drive,
    make_llm,
    model_of,
    oracle,
    row_of,
)
from support import random_ids

from polytempo.demo import demo_prompts
from polytempo.llm import DEMO_MODEL, LLM
from polytempo.tokenizer import Tokenizer
from polytempo.types import FinishReason, SamplingParams


@dataclass(frozen=True)
class Case:
    """A request and the tokens that it emits if nothing ends it."""

    prompt: tuple[int, ...]
    params: SamplingParams


def random_params(generator: random.Random, place: int, max_tokens: int, num_greedy: int) -> SamplingParams:
    """Greedy for `num_greedy` of every four places; every option in turn."""
    options: dict = {"temperature": 0.0} if place % 4 < num_greedy else {
        "temperature": generator.choice([0.7, 1.0, 1.4]), "seed": place, "top_k": generator.choice([0, 20]),
        "top_p": generator.choice([1.0, 0.95]), "min_p": generator.choice([0.0, 0.02]),
    }  # fmt: skip
    if place % 5 == 1:
        options |= {"frequency_penalty": 0.3, "repetition_penalty": 1.1}
    if place % 7 == 2:
        options |= {"min_tokens": 3, "stop_token_ids": sorted(generator.sample(range(2, 90), 4))}
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=generator.randint(0, 3), **options)


def random_cases(seed: int, count: int, max_tokens: tuple[int, int], num_greedy: int = 2) -> list[Case]:
    """Requests for a tiny model; every fourth prompt ends just before a boundary of 128."""
    generator = random.Random(seed)
    cases = []
    for place in range(count):
        length = generator.choice([generator.randint(1, 40), generator.randint(100, 300)])
        length = generator.choice([120, 123, 126, 127, 128]) if place % 4 == 0 else length
        params = random_params(generator, place, generator.randint(*max_tokens), num_greedy)
        cases.append(Case(tuple(random_ids(length, seed=1000 * seed + place)), params))
    return cases


def random_pattern(generator: random.Random):
    """Draft any number up to the most; right ones by a chance that the row keeps."""
    chance, eager = generator.choice([0.3, 0.7, 0.95]), generator.random()

    def pattern(place: int, most: int) -> tuple[int, int]:
        num_drafts = most if generator.random() < eager else generator.randint(0, most)
        num_right = 0
        while num_right < num_drafts and generator.random() < chance:
            num_right += 1
        return num_drafts, num_right

    return pattern


def random_run(model, cases, seed: int, max_rows: int, tokenizer=None, own_drafts=False, **options):
    """One engine, rows of these cases in any order, arrivals and aborts at random: (rows by case, steps)."""
    generator = random.Random(seed)
    options = {"max_chunk": generator.choice([9, 17, 40, 96]), "max_step_tokens": max(64, 8 * max_rows), **options}
    llm = make_llm(model, tokenizer, max_rows=max_rows, **options)
    script = Script(model.config.vocab_size)
    beside = MTPUnderScript(llm.engine.target, script)
    if own_drafts:
        assert type(llm.engine.proposer).__name__ == "MTPProposer"
    elif seed % 2:
        llm.engine.proposer = beside
    else:
        script.install(llm)
    rows = []
    for case in generator.sample(cases, len(cases)):
        row = row_of(llm, case.prompt, replace(case.params, draft_len=generator.randint(0, 7)))
        free = replace(case.params, stop_token_ids=None) if not case.params.min_tokens else case.params
        known = oracle(model, case.prompt, free, tokenizer).output_token_ids
        script.add(row, [*known, *[5] * 8], random_pattern(generator))
        rows.append((case, row))
    late = rows[len(rows) // 2 :]
    for _, row in rows[: len(rows) // 2]:
        llm.engine.add([row])
    doomed = [row for _, row in generator.sample(rows, len(rows) // 6)]

    def change(step: int) -> None:
        while late and (generator.random() < 0.3 or not llm.engine.has_work):
            llm.engine.add([late.pop()[1]])
        for row in doomed:
            if row.output_token_ids and not row.is_finished and generator.random() < 0.2:
                llm.engine.abort(row.request.request_id)

    steps = drive(llm, after_step=change)
    assert not late
    return rows, steps


def check(model, rows, tokenizer=None) -> Counter:
    """Every row against its oracle; tokens compared, by kind."""
    total: Counter = Counter()
    for case, row in rows:
        alone = oracle(model, case.prompt, case.params, tokenizer)
        if row.finish_reason is FinishReason.ABORT:
            count = len(row.output_token_ids)
            assert row.output_token_ids == alone.output_token_ids[:count] and row.logprobs == alone.logprobs[:count]
            total["aborted rows"] += 1
        else:
            assert answer(row) == answer(alone), f"prompt of {len(case.prompt)} tokens, {case.params}"
        total["greedy" if case.params.is_greedy else "sampled"] += len(row.output_token_ids)
    return total


@pytest.mark.parametrize("kv_advance", ["per_sequence", "cohort"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_random_patterns(dtype, kv_advance):
    """Four engines of different sizes, token budgets and chunks; scripts alone and beside the MTP block."""
    model, total, everything = model_of(dtype=dtype), Counter(), []
    cases = random_cases(seed=1, count=14, max_tokens=(10, 24))
    assert {len(case.prompt) % 4 for case in cases} == {0, 1, 2, 3}
    for seed, max_rows in enumerate((8, 3, 14) if kv_advance == "per_sequence" else (6, 3)):
        rows, steps = random_run(model, cases, seed, max_rows, kv_advance=kv_advance)
        total += check(model, rows)
        everything += steps
    if kv_advance == "per_sequence":
        assert_ragged(everything)
        drafts = [{a.num_drafts for a in step if a.verifies} for step in everything]
        assert any(0 in lengths and len(lengths) > 3 for lengths in drafts), "draft lengths do not differ in a step"
        kinds = [{(a.num_drafts > 0, a.verifies) for a in step} for step in everything]
        assert any(kind >= {(True, True), (False, False)} for kind in kinds), "no prompt chunk beside a verify"
    else:
        assert all(len({a.num_emitted for a in s if a.verifies and not a.row.is_finished}) <= 1 for s in everything)
    assert total["aborted rows"] >= 2 and total["greedy"] > 100 and total["sampled"] > 100


# --- the long sweep -----------------------------------------------------------------------------------------

TOTAL: Counter = Counter()
RUNS = ((1, 8), (2, 8), (5, 16), (16, 40), (48, 80), (128, 160))
"""(most rows at once, rows in all) of each engine."""
NUM_TINY = 16


@functools.cache
def demo_model(dtype: str):
    return LLM(dtype=dtype, max_rows=1, max_model_len=64, speculate="none", progress=False).model


def demo_cases(tokenizer, count: int) -> list[Case]:
    """The demo's prompts, cut at many places."""
    generator, cases = random.Random(0), []
    texts = [prompt.text for prompt in demo_prompts()]
    for place in range(count):
        ids = tokenizer.encode(texts[place % len(texts)])
        ids = ids[: generator.randint(min(3, len(ids)), min(len(ids), 300))]
        how = {"temperature": 0.0} if place % 3 else {"temperature": 0.8, "top_p": 0.95, "seed": place}
        params = SamplingParams(max_tokens=generator.randint(30, 60), ignore_eos=True, logprobs=1, **how)
        cases.append(Case(tuple(ids), params))
    return cases


def sweep(model, cases, seed: int, capsys, tokenizer=None, own_drafts=False, runs=RUNS) -> None:
    """Engines of every size over these cases, each case several times in the larger ones; prints what it compared."""
    generator, here = random.Random(seed), Counter()
    for place, (max_rows, count) in enumerate(runs):
        chosen = [generator.choice(cases) for _ in range(count)]
        mode = "cohort" if max_rows in (2, 5) and seed % 2 else "per_sequence"
        rows, steps = random_run(model, chosen, 10 * seed + place, max_rows, tokenizer, own_drafts, kv_advance=mode)
        here += check(model, rows, tokenizer)
        here["steps"] += len(steps)
        here["drafted"] += sum(row.stats.num_drafted for _, row in rows)
        here["accepted"] += sum(row.stats.num_accepted for _, row in rows)
        if max_rows > 5:
            assert_ragged(steps, ratios=(4,), num_residues=4)
    TOTAL.update(here)
    with capsys.disabled():
        print(f"\nidentical: {dict(here)}; in all {dict(TOTAL)}")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(NUM_TINY))
def test_identity_sweep_on_tiny_models(seed, capsys):
    """Tokens and logprob bits of ever new random models, float32 and bfloat16, 1 … 128 rows, 0 … 7 drafts."""
    dtype = torch.bfloat16 if seed % 2 else torch.float32
    model = model_of(seed=100 + seed, dtype=dtype)
    sweep(model, random_cases(100 + seed, 24, (50, 110), num_greedy=3), seed, capsys)
    oracle.cache_clear()


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_identity_sweep_on_the_demo_model(dtype, capsys):
    """The same with trained weights and the MTP block's own drafts."""
    tokenizer = Tokenizer.from_dir(DEMO_MODEL)
    model = demo_model(dtype)
    sweep(model, demo_cases(tokenizer, 16), 50, capsys, tokenizer, own_drafts=True, runs=((1, 6), (7, 24), (64, 96)))
    oracle.cache_clear()


@pytest.mark.long
def test_identity_sweep_was_long_enough(capsys):
    if TOTAL["steps"] == 0:
        pytest.skip("the sweep did not run")
    with capsys.disabled():
        print(f"\nidentity sweep, all identical: {dict(TOTAL)}")
    assert TOTAL["greedy"] >= 200_000 and TOTAL["sampled"] >= 50_000
