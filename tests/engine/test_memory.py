"""State follows live tokens, and rows that lose their seat to memory come back to the same tokens."""

from dataclasses import replace

import pytest
import torch
from speculation_support import GREEDY, Script, answer, cycle, drive, make_llm, model_of, oracle, prompt_of, row_of
from support import TINY, random_ids

from polytempo.cache.layout import StateShape, live_bytes
from polytempo.cache.store import RowStore
from polytempo.engine.scheduler import Scheduler
from polytempo.engine_config import EngineConfig
from polytempo.errors import ConfigError
from polytempo.types import SamplingParams

PARAMS = replace(GREEDY, max_tokens=120)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=4, max_tokens=120, ignore_eos=True, logprobs=1)
LENGTHS = (3, 140, 17, 250, 126, 300, 131, 60)


def memory_for(rows_of_full_length: float, max_rows: int, options: dict | None = None) -> int:
    """Bytes that hold the rings of max_rows and the entries of so many rows of 768 tokens."""
    limits = {"max_rows": max_rows, "max_model_len": 768, "max_chunk": 96, **(options or {})}
    shape = StateShape.build(TINY, EngineConfig(**limits))
    entries = shape.bytes_per_row(4) - shape.slot_bytes(4)
    null_blocks = entries // 2
    return max_rows * shape.slot_bytes(4) + null_blocks + int(rows_of_full_length * entries)


@pytest.mark.parametrize("draft_len", [0, 3, "mtp"])
def test_set_back_rows_emit_what_they_emit_alone(draft_len):
    """Eight rows that need twice the memory: the youngest go back and forth, with drafts and without."""
    model = model_of()
    llm = make_llm(model, draft_len=3 if draft_len else 0, memory=memory_for(1.6, 8))
    script = Script()
    rows, expected = [], []
    for place, length in enumerate(LENGTHS):
        params = SAMPLED if place % 3 == 2 else PARAMS
        alone = oracle(model, prompt_of(length), params)
        expected.append(alone)
        row = row_of(llm, prompt_of(length), params)
        rows.append(script.add(row, [*alone.output_token_ids, *[5] * 8], cycle(3, 0, 2, offset=place)))
    if draft_len == 3:
        script.install(llm)
    llm.engine.add(rows)
    peak = []

    def watch(_: int) -> None:
        peak.append(llm.engine.target.store.num_bytes)
        assert not any(row.drafts or row.kv_len or row.slot is not None for row in llm.engine.scheduler.waiting)

    drive(llm, after_step=watch)
    assert sum(row.num_set_back for row in rows) >= 2, "memory never ran out: this test proves nothing"
    assert rows[0].num_set_back == 0, "the oldest row was set back"
    assert [answer(row) for row in rows] == [answer(alone) for alone in expected]
    assert max(peak) <= llm.engine.config.memory
    pools = llm.engine.target.store.pool.ratios.values()
    assert all(len(pool.free) == pool.size - 1 for pool in pools), "a block was not given back"


def test_long_prompts_that_block_one_another_make_progress():
    """Two prompts that together exceed the memory, beside nothing that decodes."""
    model = model_of()
    llm = make_llm(model, memory=memory_for(1.1, 8, {"max_chunk": 32}), max_step_tokens=96, max_chunk=32)
    prompts = [tuple(random_ids(600, seed=place)) for place in range(3)]
    params = replace(GREEDY, max_tokens=20)
    rows = [row_of(llm, prompt, params) for prompt in prompts]
    scheduler = llm.engine.scheduler
    # As if they had been seated before their prompts were known: admission alone would keep them apart.
    original, scheduler.pool = scheduler.pool, None
    llm.engine.add(rows)
    seated = scheduler.admit()
    scheduler.pool = original
    assert len(seated) == 3
    drive(llm)
    assert [answer(row) for row in rows] == [answer(oracle(model, prompt, params)) for prompt in prompts]
    assert sum(row.num_set_back for row in rows) >= 1


def test_admission_waits_for_memory():
    """A row is seated when its tokens have room, and never before those in front of it."""
    llm = make_llm(model_of(), memory=memory_for(1.1, 8))
    rows = [row_of(llm, random_ids(length, seed=length), replace(GREEDY, max_tokens=2)) for length in (500, 600, 5)]
    llm.engine.add(rows)
    llm.engine.step()
    assert [row.slot for row in rows] == [0, None, None]
    drive(llm)
    assert [len(row.output_token_ids) for row in rows] == [2, 2, 2]


def test_the_least_urgent_and_youngest_row_goes_first():
    llm = make_llm(model_of(), memory=memory_for(1.6, 8))
    priorities = (1, 0, 1, 0)
    rows = [row_of(llm, random_ids(200, seed=p), GREEDY, (("priority", priorities[p]),)) for p in range(4)]
    scheduler: Scheduler = llm.engine.scheduler
    # The less urgent ones were here first: order of arrival alone would set back the urgent ones.
    for chosen in ((0, 2), (1, 3)):
        llm.engine.add([rows[place] for place in chosen])
        scheduler.admit()
    order = []
    while scheduler.running:
        scheduler._set_back_one()
        order.append(scheduler.waiting[[row.num_set_back for row in scheduler.waiting].index(1)])
        for row in scheduler.waiting:
            row.num_set_back = 2 * bool(row.num_set_back)
    assert [rows.index(row) for row in order] == [2, 0, 3, 1]
    assert [rows.index(row) for row in scheduler.waiting] == [1, 3, 0, 2], "back in the order of priority and arrival"
    assert scheduler.num_free_slots == 8


def test_memory_that_holds_no_row_is_refused():
    with pytest.raises(ConfigError, match="'memory' is .* bytes; the rings of 8 rows take .* one row of max_model_len"):
        make_llm(model_of(), memory=memory_for(0.4, 8))
    with pytest.raises(ConfigError, match="'memory' is 0"):
        make_llm(model_of(), memory=0)


def test_one_long_row_and_63_short_ones_take_little_more_than_their_tokens():
    """Rings of 64 slots, and entries for 32,768 + 63 · 1,024 tokens, taken step by step as rows grow."""
    config = replace(TINY, max_position_embeddings=40_000)
    engine = EngineConfig(max_rows=64, max_model_len=33_000, max_chunk=256)
    shape = StateShape.build(config, engine)
    store = RowStore.allocate(shape, 64, torch.bfloat16)
    lengths = [32_768] + [1_024] * 63
    for end in range(256, 32_769, 256):
        for slot, length in enumerate(lengths):
            if end <= length:
                store.pool.reserve(slot, end)
        store.fit()
    measured = store.num_bytes
    assert measured <= 1.35 * live_bytes(shape, lengths, 64, 2)
    assert measured < 0.25 * 64 * shape.bytes_per_row(2), "it is no less than what rows times max_model_len would take"
    for slot in range(64):
        store.clear(slot)
    store.shrink()
    assert store.num_bytes < 1.01 * 64 * shape.slot_bytes(2)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_blocks_of_a_failed_row_are_clean_for_the_next_owner(kernels):
    """0 · NaN is NaN: a block is zeroed when it is handed out. The kernels do not read what is masked; torch does."""
    model = model_of().with_kernels(kernels)
    llm = make_llm(model, max_rows=1)
    first = row_of(llm, prompt_of(300), replace(GREEDY, max_tokens=4))
    llm.engine.add([first])
    for _ in range(4):
        llm.engine.step()
    with torch.inference_mode():
        for layer in llm.engine.target.store.layers:
            for pooled in layer.pooled:
                pooled.entries[1:] = float("nan")
    llm.engine.abort(first.request.request_id)
    second = row_of(llm, prompt_of(300), replace(GREEDY, max_tokens=4))
    llm.engine.add([second])
    drive(llm)
    assert answer(second) == answer(oracle(model, prompt_of(300), replace(GREEDY, max_tokens=4)))
