"""The MTP proposer: what it drafts, what it costs, and that no token depends on it, on tiny and on real weights."""

import math
from dataclasses import replace

import pytest
import torch
from speculation_support import (
    GREEDY,
    LENGTHS,
    MTPUnderScript,
    Script,
    answer,
    assert_dictated,
    assert_ragged,
    begins_like,
    cycle,
    drive,
    make_llm,
    model_of,
    oracle,
    prompt_of,
    reference_drafts,
    row_of,
    write_missing_keys,
)
from support import TINY

from polytempo.llm import LLM
from polytempo.types import SamplingParams

# --- drafts against a reference, on a random model ----------------------------------------------------------


SHORT = replace(GREEDY, max_tokens=40)


def run_under_script(lengths, patterns, draft_lens=None, params=SHORT, pause=lambda number: False, **options):
    """The MTP block runs beside a script: (proposer, rows, steps). Rows equal their oracles."""
    model = model_of()
    llm = make_llm(model, **options)
    script = Script()
    proposer = llm.engine.proposer = MTPUnderScript(llm.engine.target, script, pause)
    rows = []
    for place, (length, pattern) in enumerate(zip(lengths, patterns, strict=True)):
        alone = oracle(model, prompt_of(length), params)
        own = draft_lens[place] if draft_lens else None
        row = row_of(llm, prompt_of(length), replace(params, max_tokens=30, draft_len=own))
        script.add(row, alone.output_token_ids, pattern)
        llm.engine.add([row])
        rows.append(row)
    steps = drive(llm)
    for row, length in zip(rows, lengths, strict=True):
        assert begins_like(row, oracle(model, prompt_of(length), params))
    assert_dictated(script, steps, [row for row in rows if script.of(row)])
    return proposer, rows, steps


def assert_reference(proposer, rows, params=SHORT, every=1):
    """Each proposal of the rows equals the one made from scratch; returns how many were compared."""
    compared = 0
    for row in rows:
        prompt, output = row.request.prompt_token_ids, row.output_token_ids
        made = [(key[2], drafts) for key, drafts in proposer.proposed.items() if key[0] == row.request.request_id]
        assert made
        for num_tokens, drafts in made[:: every]:
            done = output[: num_tokens - len(prompt)]
            assert drafts == reference_drafts(model_of(), prompt, done, params, len(drafts), row.request.seed), (
                len(prompt), num_tokens)  # fmt: skip
            compared += 1
    return compared


def test_drafts_equal_the_reference():
    """Rows at unequal lengths, accepted counts and draft lengths: every draft is what the block says from scratch."""
    patterns = [cycle(0, 3, 1, 2), cycle(4, 0, 2, 1), cycle(0, 1, 0), cycle(2, 1, 0)]
    proposer, rows, steps = run_under_script(LENGTHS, patterns, draft_lens=(3, 4, 1, 2), max_chunk=60)
    assert_ragged(steps)
    assert assert_reference(proposer, rows, every=3) >= 15
    flat = [draft for drafts in proposer.proposed.values() for draft in drafts]
    assert len(set(flat)) > 25, "the block's drafts are too alike to tell rows apart"


def test_seeded_drafts_carry_the_targets_noise():
    """A draft is drawn with the noise of the position that it is meant for."""
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=40, ignore_eos=True, logprobs=2)
    proposer, rows, _ = run_under_script((17, 126), [cycle(0, 3, 1), cycle(3, 0, 2)], params=params, draft_len=3)
    assert assert_reference(proposer, rows, params, every=2) >= 8
    greedy = reference_drafts(model_of(), prompt_of(17), rows[0].output_token_ids[:9], GREEDY, 3)
    seeded = reference_drafts(model_of(), prompt_of(17), rows[0].output_token_ids[:9], params, 3, 11)
    assert greedy != seeded, "the noise decides nothing"


@pytest.mark.parametrize("max_chunk", [5, 16, 25, 64])
def test_chunks_change_no_first_draft(max_chunk):
    """A prompt in pieces leaves the block the same keys; pieces that end one token before the prompt's end too."""
    lengths = (3, 17, 126, 33, 65)
    assert max_chunk in (5, 25) or any(length % max_chunk == 1 and length > max_chunk for length in lengths)
    options = {"draft_len": 3, "max_step_tokens": 300}
    proposer, rows, _ = run_under_script(lengths, [cycle(1, 3, 0)] * 5, max_chunk=max_chunk, **options)
    for row in rows:
        prompt = row.request.prompt_token_ids
        first = min(key[2] for key in proposer.proposed if key[0] == row.request.request_id)
        assert first - len(prompt) in (0, 1)
        done = row.output_token_ids[: first - len(prompt)]
        drafts = proposer.proposed[row.request.request_id, 0, first]
        assert drafts == reference_drafts(model_of(), prompt, done, GREEDY, 3), (len(prompt), first)


def mtp_keys(llm, slot: int, row, count: int = TINY.sliding_window - 1) -> torch.Tensor:
    """The block's keys of the last `count` committed pairs, oldest first: what the next draft reads of them."""
    write_missing_keys(llm, row)
    window = llm.engine.target.store.mtp[0].window[slot]
    first = max(0, row.kv_len - count)
    return torch.stack([window[position % len(window)] for position in range(first, row.kv_len)])


def test_pause_leaves_no_trace():
    """Steps without drafts, long and short: afterwards the block drafts what it would have drafted without them."""
    patterns = [cycle(0, 2, 1), cycle(3, 1), cycle(1, 0, 2)]
    options = {"draft_len": 3}
    never, rows, _ = run_under_script((3, 126, 131), patterns, **options)
    paused, again, _ = run_under_script((3, 126, 131), patterns, pause=lambda n: n in (0, 1, 5, 6, 7, 9), **options)
    assert [row.output_token_ids for row in rows] == [row.output_token_ids for row in again]
    renamed = {(key[0], key[2]): drafts for key, drafts in never.proposed.items()}
    both = [key for key in paused.proposed if (key[0], key[2]) in renamed]
    for key in both:
        shorter = min(len(paused.proposed[key]), len(renamed[key[0], key[2]]))
        assert paused.proposed[key][:shorter] == renamed[key[0], key[2]][:shorter]
    assert len(both) >= 5 and assert_reference(paused, again, every=2) > 8
    assert sum(not any(lens) for _, lens in paused.forwards_of_step[:10]) == 6


@pytest.mark.parametrize("pause", [range(0), range(1, 2), range(0, 4), range(2, 40)])
def test_keys_after_a_pause_are_whole(pause):
    """Whether it paused in the last piece of its prompt, after it, or for longer than a window: the same bits."""
    keys: list[dict[int, torch.Tensor]] = []
    for paused in (range(0), pause):
        llm = make_llm(model_of(), draft_len=3)
        script = Script()
        llm.engine.proposer = MTPUnderScript(llm.engine.target, script, lambda number, paused=paused: number in paused)
        (row,) = llm.rows_of(list(prompt_of(126)), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        script.add(row, oracle(model_of(), prompt_of(126), GREEDY).output_token_ids, cycle(0))
        llm.engine.add([row])
        found: dict[int, torch.Tensor] = {}

        def keep(number: int, llm=llm, row=row, paused=paused, found=found) -> None:
            # Looking makes the keys that were put off, so nothing is looked at while the row pauses.
            if row.slot is not None and row.kv_len > 126 and number - 1 not in paused:
                # The newest pair was drafted from: one key more than the next draft will read.
                found[row.kv_len] = mtp_keys(llm, row.slot, row, TINY.sliding_window)

        drive(llm, after_step=keep)
        keys.append(found)
    never, after = keys
    assert len(after) >= 15 and after.keys() <= never.keys()
    assert all(torch.equal(never[length], kept) for length, kept in after.items())


def test_only_decode_steps_are_timed():
    """Prompt tokens are cheaper than verify positions, and the drafts after a pause dearer: neither says what pays."""
    llm = make_llm(model_of(), draft_len="auto", max_chunk=60)
    engine, (row,) = llm.engine, llm.rows_of(list(prompt_of(40)), SHORT)
    plan = iter([[0], [1], [1], [0], [2], [1], [0], [0], [1]])
    verifies, proposals = [], []
    engine.policy._choose = lambda rows, room, fixed: next(plan, [0])
    engine.policy.costs.verify.record = lambda size, seconds: verifies.append(size)
    engine.policy.costs.first_draft.record = lambda size, seconds: proposals.append(size)
    engine.add([row])
    for _ in range(9):
        engine.step()
    assert verifies == [2, 2, 1], "nor the first of a kind after some of the other"
    assert proposals == [1, 1]


def test_no_forward_while_no_row_drafts():
    """Draft length 0 runs no MTP block, but keeps its keys, bit for bit those of a row that drafts."""
    keys = []
    for draft_len in (0, 3):
        llm = make_llm(model_of(), draft_len=draft_len)
        script = Script()
        proposer = llm.engine.proposer = MTPUnderScript(llm.engine.target, script)
        (row,) = llm.rows_of(list(prompt_of(126)), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        script.add(row, oracle(model_of(), prompt_of(126), SHORT).output_token_ids, cycle(2, 0))
        llm.engine.add([row])

        def keep(_: int, llm=llm, row=row) -> None:
            # 11 tokens: where the scripted row, which gains 3 and 1 in turn, passes too.
            if row.slot is not None and row.kv_len == 126 + 8:
                keys.append(mtp_keys(llm, row.slot, row))

        drive(llm, after_step=keep)
        assert (proposer.num_forwards == 0) == (draft_len == 0)
    assert len(keys) == 2 and torch.equal(*keys) and keys[0].abs().amax(-1).min() > 0.1


def test_slot_reuse_resets_the_block():
    """One seat: the second owner's drafts are those of a fresh engine, though the first left keys there."""
    llm = make_llm(model_of(), max_rows=1, draft_len=3)
    proposer = llm.engine.proposer = MTPUnderScript(llm.engine.target, None)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    rows = [llm.rows_of(list(prompt_of(length)), params)[0] for length in (131, 3)]
    for row in rows:
        llm.engine.add([row])
    drive(llm)
    assert assert_reference(proposer, rows[1:]) >= 3


def test_one_forward_per_draft_whatever_the_lengths():
    """Eight rows at eight lengths, unequal draft lengths: as many block forwards as the longest draft, never more."""
    lengths = (3, 17, 126, 131, 20, 41, 66, 95)
    llm = make_llm(model_of(), max_step_tokens=600, max_chunk=140)
    proposer = llm.engine.proposer = MTPUnderScript(llm.engine.target, None)
    rows = []
    for place, length in enumerate(lengths):
        params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, draft_len=place % 5)
        rows += llm.rows_of(list(prompt_of(length)), params)
        llm.engine.add(rows[-1:])
    steps = drive(llm)
    assert len({a.start for a in steps[1]}) == 8
    assert proposer.forwards_of_step[0] == (4, [0, 1, 2, 3, 4, 0, 1, 2])
    assert all(count == max(lens, default=0) for count, lens in proposer.forwards_of_step)
    assert any(0 < count < 4 for count, _ in proposer.forwards_of_step)


# --- the shipped model, whose block is trained ---------------------------------------------------------------

TEXTS = (
    "import os\n\n\ndef ", "class Reader:\n    def __init__(self, ", "# ", "for name in sorted(", '"""', "def test_",
    "    return self.", "if __name__ == ", "x = [", "from typing import ", "    raise ValueError(",
    "import re\nimport sys\n\nPATTERN = re.compile(", "try:\n    ", "    \"\"\"Return the ", "lambda ", "while True:\n",
)  # fmt: skip
FILLER = "def helper(value):\n    return value + 1\n\n\n"


@pytest.fixture(scope="module")
def demo():
    """The demo model's weights, its tokenizer, and the shared requests with their oracles."""
    llm = LLM(dtype="float32", max_rows=1, max_model_len=512, speculate="none", progress=False)
    requests = []
    for place, text in enumerate(TEXTS):
        text = FILLER * (place % 4) * 2 + text
        how = {"temperature": 0.0} if place % 2 else {"temperature": 0.8, "top_p": 0.95, "seed": place}
        params = SamplingParams(max_tokens=5 + place % 4, ignore_eos=True, logprobs=2, **how)
        requests.append((llm.tokenizer.encode(text), params))
    return llm, requests


def demo_oracle(demo, place: int):
    llm, requests = demo
    prompt, params = requests[place]
    return oracle(llm.model, tuple(prompt), params, llm.tokenizer)


@pytest.mark.parametrize(("draft_len", "batch"), [
    (0, 5), (1, 16), (2, 1), (3, 11), (4, 3), (5, 8), (6, 2), (7, 6),
])  # fmt: skip
def test_trained_drafts_change_no_token(demo, draft_len, batch):
    """Greedy and seeded rows of every batch size and draft length equal themselves alone, to the last logprob bit."""
    base, requests = demo
    llm = make_llm(base.model, base.tokenizer, max_rows=16, max_model_len=512, draft_len=draft_len, max_step_tokens=512)
    rows = []
    for place in range(batch):
        place = (place + 3 * draft_len) % len(requests)
        rows.append((place, llm.rows_of(*requests[place])[0]))
        llm.engine.add([rows[-1][1]])
    steps = drive(llm)
    assert len({len(row.request.prompt_token_ids) % 4 for _, row in rows}) > 1 or batch < 5
    for place, row in rows:
        assert answer(row) == answer(demo_oracle(demo, place)), TEXTS[place]
    drafted = sum(row.stats.num_drafted for _, row in rows)
    accepted = sum(row.stats.num_accepted for _, row in rows)
    assert (drafted == 0) == (draft_len == 0)
    if draft_len and batch >= 5:
        assert 0.1 < accepted / drafted < 0.95, "acceptance says that drafts are trivial or useless"
        ragged = [step for step in steps if len({a.num_emitted for a in step if a.verifies and a.num_drafts}) > 1]
        assert ragged, "rows never advance by different counts"
    if draft_len:
        assert llm.engine.proposer.num_forwards <= draft_len * len(steps)


def test_trained_acceptance_in_a_batch_is_that_of_each_row_alone(demo):
    """Neighbours change neither tokens nor drafts: counts by place in the run are equal too."""
    base, requests = demo
    stats = []
    for max_rows in (1, 8):
        llm = make_llm(base.model, base.tokenizer, max_rows=max_rows, max_model_len=512, draft_len=3)
        rows = [llm.rows_of(*requests[place])[0] for place in range(8)]
        for row in rows:
            llm.engine.add([row])
        drive(llm)
        stats.append([(row.stats.drafted_at, row.stats.accepted_at) for row in rows])
    assert stats[0] == stats[1] and len({tuple(accepted) for _, accepted in stats[0]}) > 3


def test_trained_drafts_resume_after_a_pause(demo):
    """A row that paused drafts, on real text, what a row that never paused drafts at the same place."""
    base, requests = demo
    prompt, _ = requests[3]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    proposed = []
    for pause in (lambda number: False, lambda number: 2 <= number < 7):
        llm = make_llm(base.model, base.tokenizer, max_rows=1, max_model_len=512, draft_len=2)
        proposer = llm.engine.proposer = MTPUnderScript(llm.engine.target, None, pause)
        (row,) = llm.rows_of(prompt, params)
        llm.engine.add([row])
        drive(llm)
        proposed.append({key[2]: drafts for key, drafts in proposer.proposed.items()})
        assert row.stats.num_accepted > 2
    both = set(proposed[0]) & set(proposed[1])
    resumed = [num_tokens for num_tokens in both if num_tokens > len(prompt) + 6]
    assert len(resumed) >= 3 and math.isclose(len(proposed[0][min(both)]), 2)
    assert all(proposed[0][num_tokens] == proposed[1][num_tokens] for num_tokens in both)


def test_every_forward_of_a_step_is_timed():
    """The first with all that a step does around it, each further one by itself, for the rows that still draft."""
    llm = make_llm(model_of(), draft_len=3)
    recorded = []
    llm.engine.policy.record_proposing = lambda *arguments: recorded.append(arguments)
    rows = [llm.rows_of(list(prompt_of(length)), SHORT)[0] for length in (5, 9)]
    llm.engine.add(rows)
    while llm.engine.has_work:
        llm.engine.step()
    drafting = [(max(lens), seconds, later) for lens, seconds, later in recorded if any(lens)]
    assert {most for most, _, _ in drafting} >= {1, 3}
    for most, seconds, later in drafting:
        assert len(later) == most - 1
        assert all(0 < one < seconds for one in later) and sum(later) < seconds
