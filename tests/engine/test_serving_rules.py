"""What serving asks of the engine: aborts inside a step, priorities, deadlines, a bounded queue, short mixed steps."""

import time
from dataclasses import replace

import pytest
from speculation_support import make_llm, model_of, oracle, prompt_of

from polytempo.engine import step as step_module
from polytempo.engine.propose import ScriptedProposer
from polytempo.engine_config import EngineConfig
from polytempo.errors import CapacityError, ConfigError, RequestError
from polytempo.types import FinishReason, SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=40)


def two_rows(llm):
    rows = [llm.rows_of(list(prompt_of(length)), GREEDY)[0] for length in (9, 14)]
    for row in rows:
        llm.engine.add([row])
    return rows


@pytest.mark.parametrize("moment", ["target_forward", "sample", "accept", "propose"])
def test_abort_inside_a_step(moment, monkeypatch):
    """Between draft, verify and commit: the aborted row gains nothing, its seat is free, its neighbour is right."""
    llm = make_llm(model_of(), draft_len=3, max_rows=2)
    leaver, stayer = two_rows(llm)
    for _ in range(4):
        llm.engine.step()
    num_tokens, is_armed = len(leaver.output_token_ids), [True]
    assert num_tokens and leaver.drafts

    def abort():
        if is_armed.pop() if is_armed else False:
            assert llm.engine.abort(leaver.request.request_id) == 1

    def aborting(original):
        def wrapped(*args, **kwargs):
            result = original(*args, **kwargs)
            abort()
            return result

        return wrapped

    if moment == "propose":
        own = llm.engine.proposer.propose
        llm.engine.proposer.propose = lambda *args: (own(*args), abort())[0]
    else:
        monkeypatch.setattr(step_module, moment, aborting(getattr(step_module, moment)))
    finished = llm.engine.step()
    assert not is_armed and finished == [leaver] and leaver.finish_reason is FinishReason.ABORT
    assert leaver.slot is None and llm.engine.scheduler.num_free_slots == 1
    if moment != "propose":
        assert len(leaver.output_token_ids) == num_tokens
    third = llm.rows_of(list(prompt_of(9)), GREEDY)[0]
    llm.engine.add([third])
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.scheduler.check()
    for row, length in ((stayer, 14), (third, 9)):
        assert row.output_token_ids == oracle(model_of(), prompt_of(length), GREEDY).output_token_ids


def test_priorities_then_arrival():
    llm = make_llm(model_of(), max_rows=1)
    rows = {name: llm.rows_of([5, 6], replace(GREEDY, max_tokens=1), priority=priority)[0]
            for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -2), ("e", 0))}  # fmt: skip
    for row in rows.values():
        llm.engine.add([row])
    order = []
    while llm.engine.has_work:
        order += [name for row in llm.engine.step() for name in rows if rows[name] is row]
    assert order == ["d", "b", "e", "a", "c"]


@pytest.mark.parametrize("is_waiting", [True, False])
def test_deadline(is_waiting):
    llm = make_llm(model_of(), max_rows=1)
    first = llm.rows_of([5, 6, 7], GREEDY)[0]
    late = llm.rows_of([5, 6], GREEDY, timeout=60.0)[0]
    for row in (first, late) if is_waiting else (late,):
        llm.engine.add([row])
    llm.engine.step()
    assert not late.is_finished
    late.request.deadline = time.monotonic()
    finished = llm.engine.step()
    assert finished == [late] and late.finish_reason is FinishReason.ABORT and "deadline" in late.error
    assert late.slot is None and len(late.output_token_ids) == (0 if is_waiting else 1)
    while llm.engine.has_work:
        llm.engine.step()
    if is_waiting:
        assert first.output_token_ids == oracle(model_of(), (5, 6, 7), GREEDY).output_token_ids


def test_bounded_queue():
    llm = make_llm(model_of(), max_rows=2, queue_limit=3)

    def add(n):
        llm.engine.add(llm.rows_of([5, 6], replace(GREEDY, n=n)))

    add(4)
    with pytest.raises(CapacityError, match=r"queue_limit \(3\)"):
        add(2)
    assert len(llm.engine.scheduler.waiting) == 4, "all rows of a request are queued, or none"
    add(1)
    with pytest.raises(CapacityError):
        add(1)
    with pytest.raises(RequestError, match="n: 6 outputs") as caught:
        make_llm(model_of(), max_rows=2, queue_limit=3).engine.add(llm.rows_of([5, 6], replace(GREEDY, n=6)))
    assert caught.value.param == "n"


def test_a_call_that_is_refused_leaves_no_row_behind():
    """Its first prompts stayed in the queue, and every later call was refused too."""
    llm = make_llm(model_of(), max_rows=1, queue_limit=1)
    with pytest.raises(CapacityError):
        llm.generate([[5, 6], [5, 7], [5, 8]], GREEDY, progress=False)
    assert not llm.engine.has_work
    (output,) = llm.generate([[5, 6]], GREEDY, progress=False)
    assert list(output.outputs[0].token_ids) == oracle(model_of(), (5, 6), GREEDY).output_token_ids


def test_mixed_steps_are_short_and_change_nothing():
    """While a row decodes, prompts get mixed_prompt_tokens per step, all together; alone they get whole chunks."""
    llm = make_llm(model_of(), mixed_prompt_tokens=10, max_rows=3, max_chunk=64, draft_len=2)
    planned = []
    plan = llm.engine.scheduler.plan
    llm.engine.scheduler.plan = lambda: planned.append(plan()) or planned[-1]
    rows = [llm.rows_of(list(prompt_of(length)), GREEDY)[0] for length in (30, 126, 50)]
    llm.engine.add(rows[:1])
    llm.engine.step()
    llm.engine.add(rows[1:2])
    llm.engine.add(rows[2:])
    while llm.engine.has_work:
        llm.engine.step()
    sums = []
    for items in planned:
        prompt = sum(len(item.segment.token_ids) for item in items if _is_prompt(item))
        sums.append((any(not _is_prompt(item) for item in items), prompt))
    mixed = [count for decodes, count in sums if decodes and count]
    assert sums[0] == (False, 30) and len(mixed) >= 10 and max(mixed) == 10
    for row, length in zip(rows, (30, 126, 50), strict=True):
        assert row.output_token_ids == oracle(model_of(), prompt_of(length), GREEDY).output_token_ids


def _is_prompt(item) -> bool:
    return item.segment.start < len(item.row.request.prompt_token_ids) - 1


@pytest.mark.parametrize(("name", "value"), [("mixed_prompt_tokens", 0), ("mixed_prompt_tokens", "9"),
                                             ("queue_limit", -1), ("queue_limit", True)])  # fmt: skip
def test_bad_options(name, value):
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{name: value})


def test_script_may_abort_its_own_row():
    """A proposer that ends the row it drafts for, as a client does that leaves at that moment."""
    llm = make_llm(model_of(), draft_len=2, max_rows=1)

    def script(row, most):
        if len(row.output_token_ids) == 3:
            llm.engine.abort(row.request.request_id)
        return [7] * most

    llm.engine.proposer = ScriptedProposer(script)
    (row,) = llm.rows_of([5, 6], GREEDY)
    llm.engine.add([row])
    while llm.engine.has_work:
        llm.engine.step()
    assert row.finish_reason is FinishReason.ABORT and len(row.output_token_ids) == 3
    assert llm.engine.scheduler.num_free_slots == 1
