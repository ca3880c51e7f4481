"""Engine steps on a device that is not there: how often each waits for it, and how often it has to."""

from __future__ import annotations

import torch
from fake_cuda import DEVICE, Answers, Refusals
from speculation_support import make_llm
from support import with_ratios

from polytempo.cache.snapshot import SPAN
from polytempo.engine.row import Row
from polytempo.llm import LLM
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.types import SamplingParams

SMALL = with_ratios(4, 128, hc_sinkhorn_iters=2)
MAX_CHUNK = 96


def fake_llm(dtype: torch.dtype = torch.float32, **options) -> LLM:
    """An engine over a model on the device, within `fake_cuda`."""
    return make_llm(DeepseekV4(SMALL, dtype, DEVICE).requires_grad_(False), **options)


def prompt_of(length: int) -> list[int]:
    """Distinct for every length; torch's own random numbers would be fake here."""
    return [(place * length + place) % (SMALL.vocab_size - 2) + 2 for place in range(length)]


def params(**options) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "detokenize": False, **options})


def waits_by_step(llm: LLM, rows: list[Row], *answers: int) -> list[tuple[dict, dict, int]]:
    """For each step: how often it asked the device; how often it had to, and why; boundaries that rows crossed."""
    found = []
    engine = llm.engine
    while engine.has_work:
        had = {id(row): (len(row.output_token_ids), row.kv_len) for row in rows}
        wanted_before = sum(len(row.request.prompt_logprobs or ()) for row in rows)
        forwards = getattr(engine.proposer, "num_forwards", 0)
        with Refusals(), Answers(*answers) as answered:
            engine.step()
        sampled = [row for row in rows if len(row.output_token_ids) > had[id(row)][0]]
        had_to = {
            "tokens": int(bool(sampled)),
            "logprobs": int(any(row.request.params.logprobs is not None for row in sampled)),
            "prompt logprobs": int(sum(len(row.request.prompt_logprobs or ()) for row in rows) > wanted_before),
            "drafts": getattr(engine.proposer, "num_forwards", 0) - forwards,
        }
        snapshots = 0
        if engine.target.prefix_cache is not None:
            # A choice that took the state of another one jumps further than a chunk, and is not looked at.
            moved = [(had[id(row)][1], row.kv_len) for row in rows if not row.is_finished]
            snapshots = sum(new // SPAN > old // SPAN for old, new in moved if new - old <= MAX_CHUNK)
        found.append((dict(answered.asked), had_to, snapshots))
        assert len(found) < 200
    return found


def check(steps) -> None:
    for number, (asked, had_to, snapshots) in enumerate(steps):
        expected = {"tolist": sum(had_to.values()), "__bool__": snapshots}
        assert asked == {name: count for name, count in expected.items() if count}, f"step {number}: {had_to}"
