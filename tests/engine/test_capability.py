"""PER_SEQUENCE is granted only if every part carries per-row positions; the first that does not is named."""

import warnings

import pytest
from speculation_support import (
    GREEDY,
    LENGTHS,
    Script,
    answer,
    cycle,
    drive,
    make_llm,
    model_of,
    oracle,
    prompt_of,
    row_of,
)

from polytempo.cache.view import BatchView
from polytempo.cache.window import LeftAlignedLayout, RingLayout
from polytempo.engine.capability import first_missing, granted_advance_mode
from polytempo.engine.propose import MTPProposer, NoProposer, ScriptedProposer
from polytempo.engine.target import Target
from polytempo.engine_config import AdvanceMode

PARTS = {"cache layout": RingLayout(16, 32), "mask builder": BatchView, "step": Target, "draft chain": NoProposer()}


class Lacking:
    """Carries nothing."""


class Denying:
    """Says so."""

    per_row_positions = False


def test_our_own_parts_carry_per_row_positions():
    assert first_missing(PARTS) is None
    assert all(part.per_row_positions is True for part in (MTPProposer, ScriptedProposer, LeftAlignedLayout))


@pytest.mark.parametrize("name", list(PARTS))
@pytest.mark.parametrize("part", [Lacking(), Denying()])
def test_the_part_that_lacks_it_is_named(name, part):
    parts = {**PARTS, name: part}
    with pytest.warns(UserWarning, match=f"the {name} .{type(part).__name__}. does not carry per-row positions"):
        assert granted_advance_mode(AdvanceMode.PER_SEQUENCE, parts) is AdvanceMode.COHORT


def test_the_first_of_several_is_named():
    assert first_missing({**PARTS, "mask builder": Lacking(), "draft chain": Denying()}) == "the mask builder (Lacking)"


def test_cohort_asks_for_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert granted_advance_mode(AdvanceMode.COHORT, {"step": Lacking()}) is AdvanceMode.COHORT


@pytest.mark.parametrize("carries", [True, False])
def test_an_engine_with_such_a_draft_chain_advances_by_cohort(carries):
    """And its output is what each prompt gives alone, as ever."""
    model = model_of()
    llm = make_llm(model, draft_len=3)
    script = Script()

    class Chain(ScriptedProposer):
        per_row_positions = carries

    expected = [oracle(model, prompt_of(length), GREEDY) for length in LENGTHS]
    rows = []
    for place, (length, alone) in enumerate(zip(LENGTHS, expected, strict=True)):
        row = row_of(llm, prompt_of(length), GREEDY)
        rows.append(script.add(row, alone.output_token_ids, cycle(3, 1, offset=place)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm.engine.proposer = Chain(script)
    assert bool(caught) is not carries
    assert llm.engine.advance_mode is (AdvanceMode.PER_SEQUENCE if carries else AdvanceMode.COHORT)
    llm.engine.add(rows)
    steps = drive(llm)
    full = [step for step in steps if len(step) == len(rows) and all(a.verifies for a in step)]
    assert any(len({a.num_emitted for a in step}) > 1 for step in full) is carries
    assert [answer(row) for row in rows] == [answer(alone) for alone in expected]
