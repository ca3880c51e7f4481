"""Bad words: which tokens they are, and what may not follow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytempo.engine.bad_words import BadWords, bad_word_token_ids
from polytempo.errors import RequestError


def words_by_space(text):
    """A tokenizer whose words own the space before them: 1 and up; "x" leads a split word."""
    table = {"own": (1,), " own": (2,), "b": (3,), " b": (9, 3), "two w": (4, 5), " two w": (6, 5), "": ()}
    return table[text]


def test_bad_words_are_banned_with_and_without_a_leading_space():
    assert bad_word_token_ids(["own"], words_by_space) == ((1,), (2,))
    assert bad_word_token_ids([" own"], words_by_space) == ((2,),)
    assert bad_word_token_ids(["b"], words_by_space) == ((3,),), "(9, 3) is banned by (3,) already"
    assert bad_word_token_ids(["two w", "own", "own"], words_by_space) == ((4, 5), (6, 5), (1,), (2,))
    with pytest.raises(RequestError, match="bad_words='' is refused"):
        bad_word_token_ids([""], lambda text: ())


TOKENS = st.lists(st.integers(0, 2), max_size=4)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=8), TOKENS, TOKENS)
def test_banned_is_what_would_complete_a_sequence(sequences, prompt, output):
    history = prompt + output
    expected = {last for last in range(3) for word in sequences
                if word[-1] == last and (history + [last])[-len(word) :] == word}  # fmt: skip
    words = BadWords.of(sequences)
    assert words.banned_after(prompt, output) == expected and bool(words) == bool(sequences)
