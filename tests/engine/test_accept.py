"""Acceptance and advance modes: pure, so every case is written out, and a slow twin decides the rest."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.engine.accept import Verdict, accept, advance
from polytempo.engine_config import AdvanceMode
from polytempo.errors import InvariantError


@pytest.mark.parametrize(("drafts", "target", "expected"), [
    ([], [7], Verdict(0, [7])),
    ([5], [5, 7], Verdict(1, [5, 7])),
    ([5], [6, 7], Verdict(0, [6])),
    ([5, 6, 7], [5, 6, 7, 8], Verdict(3, [5, 6, 7, 8])),
    ([5, 6, 7], [5, 6, 9, 8], Verdict(2, [5, 6, 9])),
    ([5, 6, 7], [5, 9, 7, 8], Verdict(1, [5, 9])),
    ([5, 6, 7], [9, 6, 7, 8], Verdict(0, [9])),
    ([0, 0], [0, 0, 0], Verdict(2, [0, 0, 0])),
    ([5, 6], [5, 0, 0], Verdict(1, [5, 0])),
    # A position without a token counts only if every draft before it was right.
    ([], [None], Verdict(0, [], failed_at=0)),
    ([5, 6], [None, 6, 7], Verdict(0, [], failed_at=0)),
    ([5, 6], [5, None, 7], Verdict(1, [5], failed_at=1)),
    ([5, 6], [5, 6, None], Verdict(2, [5, 6], failed_at=2)),
    ([5, 6], [9, None, None], Verdict(0, [9])),
    ([5, 6, 7], [5, 9, None, 8], Verdict(1, [5, 9])),
])  # fmt: skip
def test_accept(drafts, target, expected):
    assert accept(drafts, target) == expected


@pytest.mark.parametrize(("drafts", "target"), [([], []), ([1], [1]), ([1], [1, 2, 3]), ([1, 2], [1, 2])])
def test_wrong_numbers_are_refused_with_both(drafts, target):
    with pytest.raises(InvariantError, match=f"{len(drafts)} drafts need {len(drafts) + 1} .*not {len(target)}"):
        accept(drafts, target)


def emitted_one_by_one(drafts, target):
    """What plain decoding emits: the target's token at each place, as long as the drafts foretold it."""
    emitted = []
    for place in range(len(target)):
        if target[place] is None:
            return emitted, place
        emitted.append(target[place])
        if emitted != list(drafts[: place + 1]):
            return emitted, None
    return emitted, None


TOKENS = st.integers(0, 2)


@settings(max_examples=400, deadline=None)
@given(st.lists(TOKENS, max_size=8).flatmap(lambda drafts: st.tuples(st.just(drafts), st.lists(
    st.one_of(TOKENS, TOKENS, TOKENS, st.none()), min_size=len(drafts) + 1, max_size=len(drafts) + 1))))  # fmt: skip
def test_accept_equals_its_slow_twin(case):
    drafts, target = case
    verdict = accept(drafts, target)
    emitted, failed_at = emitted_one_by_one(drafts, target)
    assert (list(verdict.new_token_ids), verdict.failed_at) == (emitted, failed_at)
    assert verdict.num_accepted == len(emitted) - (failed_at is None)
    assert emitted[: verdict.num_accepted] == drafts[: verdict.num_accepted]


@settings(max_examples=200, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=6), st.integers(0, 6))
def test_what_follows_a_rejection_is_ignored(target, place):
    drafts = list(target[:-1])
    place = min(place, len(drafts))
    if place < len(drafts):
        drafts[place] = 9
    garbled = [*target[: place + 1], *(None for _ in target[place + 1 :])]
    assert accept(drafts, target) == accept(drafts, garbled)


def verdicts_of(*counts):
    return [Verdict(count - 1, list(range(10 * place, 10 * place + count))) for place, count in enumerate(counts)]


def test_per_sequence_changes_nothing():
    verdicts = [*verdicts_of(1, 4, 2), Verdict(3, [1, 2, 3], failed_at=3)]
    assert advance(verdicts, AdvanceMode.PER_SEQUENCE) == verdicts


def test_cohort_cuts_to_the_shortest():
    verdicts = verdicts_of(3, 4, 2)
    held = advance(verdicts, AdvanceMode.COHORT)
    assert [list(one.new_token_ids) for one in held] == [[0, 1], [10, 11], [20, 21]]
    assert [one.num_accepted for one in held] == [2, 3, 1], "what the target accepted stays known"
    assert held[2] is verdicts[2]
    assert advance([], AdvanceMode.COHORT) == []


@pytest.mark.parametrize("num_kept", [0, 1, 3])
def test_cohort_leaves_failed_rows_out(num_kept):
    """A row that ends with an error neither holds the others back nor is held back by them."""
    failed = Verdict(num_kept, list(range(num_kept)), failed_at=num_kept)
    held = advance([*verdicts_of(3, 2), failed], AdvanceMode.COHORT)
    assert [len(one.new_token_ids) for one in held] == [2, 2, num_kept] and held[2] is failed
    assert advance([failed], AdvanceMode.COHORT) == [failed]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=7))
def test_cohort_equals_its_slow_twin(rows):
    verdicts = [Verdict(n, list(range(n + (not bad))), failed_at=n if bad else None) for n, bad in rows]
    running = [len(one.new_token_ids) for one in verdicts if one.failed_at is None]
    for before, after in zip(verdicts, advance(verdicts, AdvanceMode.COHORT), strict=True):
        limit = len(before.new_token_ids) if before.failed_at is not None else min(running)
        assert list(after.new_token_ids) == list(before.new_token_ids)[:limit]
        assert (after.num_accepted, after.failed_at) == (before.num_accepted, before.failed_at)
