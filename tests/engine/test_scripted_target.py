"""The step against a target whose output is written down beforehand: no model, no numerics, every count by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speculation_support import GREEDY, ScriptedTarget, make_llm, row_of

from polytempo.engine.propose import ScriptedProposer
from polytempo.types import FinishReason

VOCAB = 61
PARAMS = replace(GREEDY, logprobs=None)


def target_of(step: int) -> ScriptedTarget:
    """Counts up by `step`: with a prime vocabulary every token comes once before any comes again."""
    return ScriptedTarget([(token + step) % VOCAB for token in range(VOCAB)])


def simulate(tokens: list[int], plan: list[tuple[int, int]], max_tokens: int, stops: frozenset[int]):
    """What must come out, by hand: (output, finish reason, verifies, drafted, accepted) of one row.

    Args:
        tokens: the target's own.
        plan: (drafts, right ones) of each verify in turn, used round and round.
        max_tokens: of the request.
        stops: stop ids.
    """
    output, verifies, drafted, accepted = [], 0, 0, 0
    drafts = right = 0
    while True:
        verifies, drafted, accepted = verifies + 1, drafted + drafts, accepted + right
        for token in tokens[len(output) : len(output) + right + 1]:
            output.append(token)
            if token in stops:
                return output, FinishReason.STOP, verifies, drafted, accepted
            if len(output) == max_tokens:
                return output, FinishReason.LENGTH, verifies, drafted, accepted
        most, right = plan[(verifies - 1) % len(plan)]
        # No draft is made that max_tokens would cut off.
        drafts = min(most, max_tokens - len(output) - 1)
        right = min(right, drafts)


row_plans = st.lists(
    st.integers(0, 5).flatmap(lambda most: st.tuples(st.just(most), st.integers(0, most))), min_size=1, max_size=4
)
rows_drawn = st.lists(
    st.tuples(st.integers(1, 9), row_plans, st.integers(1, 25), st.sets(st.integers(0, VOCAB - 1), max_size=3)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(rows=rows_drawn, step=st.integers(1, VOCAB - 1))
def test_any_plan_of_any_rows(rows, step):
    """Tokens, finish reasons and statistics equal the simulation's, whatever each row drafts and its neighbours do.

    Prompts come in one piece: a chunk that ends one token early would let the row draft before its first token.
    """
    target = target_of(step)
    llm = make_llm(target, max_rows=3, max_chunk=9, max_step_tokens=30, draft_len=5, speculate="none")
    plans, tokens, seen, expected, made = {}, {}, {}, [], []
    for place, (length, plan, max_tokens, stops) in enumerate(rows):
        prompt = [(7 * place + token) % VOCAB for token in range(length)]
        params = replace(PARAMS, max_tokens=max_tokens, stop_token_ids=sorted(stops) or None)
        row = row_of(llm, prompt, params)
        plans[id(row)], tokens[id(row)], seen[id(row)] = plan, target.output(prompt[-1], 40), 0
        expected.append(simulate(tokens[id(row)], plan, max_tokens, frozenset(stops)))
        made.append(row)

    def script(row, most):
        drafts, right = plans[id(row)][seen[id(row)] % len(plans[id(row)])]
        done = len(row.output_token_ids)
        ids = tokens[id(row)][done : done + min(drafts, most)]
        return [token if place < right else (token + 1) % VOCAB for place, token in enumerate(ids)]

    class Counting(ScriptedProposer):
        def propose(self, items, streams, draft_lens, are_kept):
            super().propose(items, streams, draft_lens, are_kept)
            for item in items:
                seen[id(item.row)] += item.row.is_decoding

    llm.engine.proposer = Counting(script)
    llm.engine.add(made)
    for _ in range(400):
        if llm.engine.has_work:
            llm.engine.step()
            llm.engine.scheduler.check()
    assert not llm.engine.has_work
    for row, wanted in zip(made, expected, strict=True):
        stats = row.stats
        got = (row.output_token_ids, row.finish_reason, stats.num_verifies, stats.num_drafted, stats.num_accepted)
        assert got == wanted


@pytest.mark.parametrize("num_right", range(6))
def test_a_stop_at_every_place_of_an_accepted_run(num_right):
    """Five drafts, `num_right` right; a stop id at each place that is emitted ends the row there, and nowhere else."""
    target = target_of(3)
    tokens = target.output(5, 40)
    for place in range(1, num_right + 2):
        # tokens[0] comes from the prompt's step, without drafts; the run after it is tokens[1] … tokens[num_right + 1].
        stop = tokens[place]
        llm = make_llm(target, draft_len=5, speculate="none")
        right = [*tokens[1 : 1 + num_right], *[VOCAB - 1] * 5][:5]
        llm.engine.proposer = ScriptedProposer(lambda row, most, right=right: right[:most])
        row = row_of(llm, [5], replace(PARAMS, stop_token_ids=[stop]))
        llm.engine.add([row])
        for _ in range(2):
            llm.engine.step()
        assert row.output_token_ids == tokens[: place + 1] and row.finish_reason is FinishReason.STOP
        assert (row.stats.num_drafted, row.stats.num_accepted) == (5, num_right), "counted before the stop trims"
