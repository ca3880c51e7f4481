"""How often a step waits for its device: once for its tokens, and once more for what only some requests ask for."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from device_waits import MAX_CHUNK, check, fake_llm, params, prompt_of, waits_by_step
from fake_cuda import DEVICE, fake_cuda, shape_only_experts

from polytempo.cache.snapshot import SPAN
from polytempo.engine import step as step_module
from polytempo.model.forward import target_forward as forward
from polytempo.model.moe import Experts


@pytest.fixture(autouse=True)
def experts(monkeypatch):
    monkeypatch.setattr(Experts, "forward", shape_only_experts)


@pytest.mark.parametrize("draft_len, answers, accepts", [
    (0, (7,), "nothing"), (2, (7,), "everything"), (2, (7, 7, 8, 8, 7), "some"),
])  # fmt: skip
def test_a_step_reads_its_tokens_once_and_each_draft_once(draft_len, answers, accepts):
    with fake_cuda():
        llm = fake_llm(kernels="torch", draft_len=draft_len, max_chunk=32)
        rows = [llm.rows_of(prompt_of(length), params(max_tokens=9 + length % 4))[0] for length in (35, 40)]
        for row in rows:
            llm.engine.add([row])
        steps = waits_by_step(llm, rows, *answers)
        assert all(row.error is None and len(row.output_token_ids) == row.request.params.max_tokens for row in rows)
    check(steps)
    kinds = {tuple(name for name, count in had_to.items() if count) for _, had_to, _ in steps}
    assert kinds == ({(), ("tokens",)} | ({("tokens", "drafts")} if draft_len else set()))
    accepted, drafted = (sum(getattr(row.stats, name) for row in rows) for name in ("num_accepted", "num_drafted"))
    found = "nothing" if not accepted else "everything" if accepted == drafted else "some"
    assert found == accepts and (drafted > 0) == (draft_len > 0)


def test_each_option_that_must_wait_waits_once():
    options = [
        {"logprobs": 3}, {"logprobs": 0, "temperature": 0.7, "top_p": 0.9, "seed": 1, "prompt_logprobs": 2},
        {"temperature": 1.0, "top_k": 7, "repetition_penalty": 1.2, "seed": 2, "n": 2},
    ]  # fmt: skip
    with fake_cuda():
        llm = fake_llm(kernels="torch", draft_len=1, prefix_cache=2**30, max_chunk=MAX_CHUNK)
        rows = []
        for place, one in enumerate(options):
            of_request = llm.rows_of(prompt_of(140 + place), params(max_tokens=3, **one))
            llm.engine.add(of_request)
            rows += of_request
        steps = waits_by_step(llm, rows, 7)
        assert all(row.error is None and row.output_token_ids for row in rows)
        assert llm.engine.sharing.num_rows == 1 and len(llm.engine.target.prefix_cache) == len(options)
        again = llm.rows_of(prompt_of(140), params(max_tokens=3))
        llm.engine.add(again)
        steps += waits_by_step(llm, again, 7)
        assert again[0].num_cached == SPAN
    check(steps)
    reasons = {name for _, had_to, _ in steps for name, count in had_to.items() if count}
    assert reasons == {"tokens", "logprobs", "prompt logprobs", "drafts"}
    assert sum(snapshots for _, _, snapshots in steps) == len(options)


def test_left_aligned_rows_and_cohorts_run_on_a_device():
    with fake_cuda():
        llm = fake_llm(kernels="torch", draft_len=2, kv_layout="left_aligned", kv_advance="cohort", max_chunk=16)
        rows = [llm.rows_of(prompt_of(length), params(max_tokens=5))[0] for length in (3, 20)]
        for row in rows:
            llm.engine.add([row])
        check(waits_by_step(llm, rows, 7, 8, 7))
        assert all(row.error is None for row in rows)


def test_a_step_makes_its_device_the_current_one(monkeypatch):
    """Kernels that are launched by hand run on the thread's current device, whatever device their tensors are on."""
    current = []

    @contextmanager
    def make_current(device):
        current.append(device)
        yield
        current.pop()

    seen = []
    def watched(*args, **options):
        seen.append(list(current))
        return forward(*args, **options)

    monkeypatch.setattr(step_module, "target_forward", watched)
    with fake_cuda():
        monkeypatch.setattr(torch.cuda, "device", make_current)
        llm = fake_llm(kernels="torch")
        llm.engine.add(llm.rows_of(prompt_of(5), params(max_tokens=1)))
        waits_by_step(llm, [], 7)
    assert seen == [[DEVICE]] and not current
