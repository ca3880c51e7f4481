"""Streamed text never shows half a character or part of a stop string, however tokens are grouped into runs."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from polytempo.engine.text import (
    REPLACEMENT,
    IncrementalDetokenizer,
    OutputText,
)
from polytempo.errors import InvariantError
from polytempo.tokenizer import Tokenizer
from polytempo.types import SamplingParams

PIECES = ["own", " fox", "own fox", " quick", "bro", "END", "ab", "abc", "中", " b"]


def spelling(data: bytes) -> str:
    """How a byte-level vocabulary writes these bytes."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(data.decode())[0][0]


def byte_level() -> Tokenizer:
    """One token per byte (ids in an arbitrary order), some longer pieces, one special token."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for piece in PIECES:
        vocab[spelling(piece.encode())] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, eos_token="<eos>")


def byte_fallback() -> Tokenizer:
    """Bytes as <0xNN> tokens; an invalid run becomes one U+FFFD per byte."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocab.update({letter: 257 + i for i, letter in enumerate("abcd▁")})
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend)


BYTES, FALLBACK = byte_level(), byte_fallback()
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def ids_of(text: str) -> list[int]:
    """One token per byte of `text`."""
    return [LETTERS.index(letter) for letter in spelling(text.encode())] if text else []


def piece(text: str) -> int:
    return len(LETTERS) + PIECES.index(text)


def run_through(ids, groups, tokenizer=BYTES, **options):
    """Feed `ids` in runs of the given lengths: (text, deltas, tokens kept, stop)."""
    output = OutputText(tokenizer, SamplingParams(**options))
    deltas, kept, stop, rest = [], 0, None, list(ids)
    for size in [*groups, len(ids)]:
        run, rest = rest[:size], rest[size:]
        update = output.append(run)
        deltas.append(update.delta)
        kept += update.num_tokens
        stop = update.stop
        if stop is not None:
            break
    deltas.append(output.finish())
    return output.text, deltas, kept, stop


# --- characters ---------------------------------------------------------------------------------------------


def test_fixture_is_what_the_tests_assume():
    assert BYTES.decode(ids_of("a🙂中")) == "a🙂中" and len(ids_of("🙂")) == 4
    assert BYTES.decode([piece("own fox"), piece("中")]) == "own fox中"
    assert BYTES.decode(ids_of("🙂")[:3]) == REPLACEMENT
    assert FALLBACK.decode([1 + byte for byte in "🙂".encode()[:3]]) == REPLACEMENT * 3


@pytest.mark.parametrize("group", [1, 2, 3, 4, 100])
def test_an_answer_cut_inside_an_emoji_shows_one_replacement_at_the_end(group):
    """Every token piece was once decoded on its own, and each byte of an emoji became a replacement character."""
    ids = ids_of("hi 🙂 中文 🙂")[:-1]
    text, deltas, kept, _ = run_through(ids, [group] * len(ids))
    assert text == "hi 🙂 中文 " + REPLACEMENT
    assert "".join(deltas) == text and kept == len(ids)
    assert REPLACEMENT not in "".join(deltas[:-1])


def test_characters_are_delivered_as_soon_as_they_are_whole():
    detokenizer = IncrementalDetokenizer(BYTES)
    assert [detokenizer.append(i) for i in ids_of("a🙂b")] == ["a", "", "", "", "🙂", "b"]


def test_text_before_a_half_character_in_one_run_is_not_held_back():
    _, deltas, _, _ = run_through(ids_of("hello 🙂")[:-2], [100])
    assert deltas[0] == "hello "


def test_invalid_bytes_in_the_middle_read_as_the_whole_decodes():
    ids = [*ids_of("a"), *ids_of("🙂")[:2], *ids_of("b")]
    text, deltas, _, _ = run_through(ids, [1] * 9)
    assert text == BYTES.decode(ids) == f"a{REPLACEMENT}b"
    assert deltas[:4] == ["a", "", "", f"{REPLACEMENT}b"]


def test_byte_fallback_truncation_is_one_replacement_and_whole_characters_survive():
    emoji = [1 + byte for byte in "🙂".encode()]
    for cut in (1, 2, 3):
        text, deltas, _, _ = run_through([257, *emoji, 258, *emoji[:cut]], [1] * 20, FALLBACK)
        assert text == f"a🙂b{REPLACEMENT}"
        assert REPLACEMENT not in "".join(deltas[:-1])
    text, _, _, _ = run_through([*emoji, *emoji, *emoji[:2]], [3] * 9, FALLBACK)
    assert text == f"🙂🙂{REPLACEMENT}"
    text, _, _, _ = run_through([*emoji, 256, 257], [1] * 9, FALLBACK)
    assert text == f"🙂{REPLACEMENT}a", "what is delivered is never taken back"


def test_special_tokens_are_left_out_unless_wanted():
    ids = [*ids_of("a"), BYTES.eos_token_id, *ids_of("b")]
    assert run_through(ids, [1] * 3)[0] == "ab"
    assert run_through(ids, [1] * 3, skip_special_tokens=False)[0] == "a<eos>b"


def test_left_context_survives_skipped_tokens():
    """A decoder that strips the first space must not do so again after a special token."""
    vocab = {"▁a": 0, "▁b": 1, "<s>": 2}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend)
    ids = [0, 2, 2, 1, 2, 1]
    assert run_through(ids, [1] * 6, tokenizer)[0] == tokenizer.decode(ids) == "a b b"


# --- stop strings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 3, 7, 100])
def test_a_stop_string_never_leaks_and_a_near_miss_is_delivered(group):
    ids = ids_of("the brown fog, the brown fox jumps")
    text, deltas, kept, stop = run_through(ids, [group] * len(ids), stop="own fox")
    assert text == "".join(deltas) == "the brown fog, the br"
    assert stop == "own fox"
    assert BYTES.decode(ids[:kept]) == "the brown fog, the brown fox"


def test_text_that_cannot_begin_a_stop_is_delivered_at_once():
    output = OutputText(BYTES, SamplingParams(stop=["own fox", "END"]))
    deltas = [output.append([i]).delta for i in ids_of("brown E own fog")]
    assert deltas == ["b", "r", "", "", "", "", "own ", "E ", "", "", "", "", "", "", "own fog"]


def test_the_three_places_of_a_stop_string_in_an_accepted_run():
    run = [piece("bro"), *ids_of("w"), piece("own fox"), piece(" quick"), *ids_of("xyz")]
    # inside the first token of the run
    assert run_through(run, [7], stop="r")[::2] == ("b", 1)
    # begins in the last token of the run before, ends in the second of this one
    assert run_through(run, [2, 5], stop="wown fox q")[::2] == ("bro", 4)
    # two stop strings are there, the one listed later comes first
    assert run_through(run, [7], stop=["quick", "fox"])[::2] == ("browown ", 3)


def test_within_one_token_the_match_that_begins_first_counts_and_then_the_shorter():
    assert run_through([piece("abc")], [], stop=["c", "bc", "b"])[0::3] == ("a", "b")
    assert run_through([piece("abc")], [], stop=["abc", "ab"])[3] == "ab"
    assert run_through([piece("ab"), *ids_of("c")], [], stop=["abc", "b"])[0::3] == ("a", "b")


def test_the_matched_stop_can_be_kept():
    ids = [piece("bro"), piece("own fox"), piece(" quick")]
    text, deltas, kept, stop = run_through(ids, [3], stop="own f", include_stop_str_in_output=True)
    assert (text, kept, stop) == ("broown f", 2, "own f")


def test_min_tokens_lets_earlier_stop_strings_pass():
    ids = ids_of("xENDyEND")
    for min_tokens, expected in ((0, "x"), (3, "x"), (4, "xENDy"), (7, "xENDy"), (8, "xENDyEND")):
        assert run_through(ids, [1] * 8, stop="END", min_tokens=min_tokens)[0] == expected
    # "b" ended inside held text, before min_tokens; the next token must not find it late
    assert run_through(ids_of("abx"), [1] * 3, stop=["abc", "b"], min_tokens=2)[0] == "abx"


def test_held_text_is_delivered_when_the_output_ends_otherwise():
    text, deltas, _, stop = run_through(ids_of("a brown fo"), [1] * 20, stop="own fox")
    assert text == "a brown fo" and deltas[-1] == "own fo" and stop is None


def test_an_ended_output_takes_no_more():
    output = OutputText(BYTES, SamplingParams(stop="b"))
    assert output.append(ids_of("ab")).stop == "b"
    assert output.finish() == "" and output.text == "a"
    with pytest.raises(InvariantError, match="ended"):
        output.append(ids_of("c"))


# --- properties ---------------------------------------------------------------------------------------------

token_ids = st.lists(
    st.one_of(
        st.sampled_from(ids_of("abE🙂")),
        st.integers(256, 256 + len(PIECES)),  # pieces and the special token
        st.integers(0, 255),
    ),
    max_size=24,
)
group_sizes = st.lists(st.integers(0, 8), max_size=24)
stops = st.lists(st.sampled_from(["a", "ab", "ba", "abc", "own fox", "END", "🙂", "中", "E🙂"]), max_size=3)


def plain_search(ids, stops, min_tokens, include):
    """The same rule without streaming: decode every prefix, stop at the first that gained a stop string."""
    shown = [BYTES.decode(ids[:count]).rstrip(REPLACEMENT) for count in range(len(ids) + 1)]
    for count in range(min_tokens + 1, len(ids) + 1):
        before, now = shown[count - 1], shown[count]
        matches = [
            (begin, len(stop))
            for stop in stops
            for begin in range(len(now))
            if now.startswith(stop, begin) and begin + len(stop) > len(before)
        ]
        if matches:
            begin, length = min(matches)
            return now[: begin + length * include], count
    return BYTES.decode(ids), len(ids)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(token_ids, group_sizes, stops, st.integers(0, 4), st.booleans())
def test_any_grouping_gives_the_text_of_a_plain_search(ids, groups, stops, min_tokens, include):
    options = dict(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
    text, deltas, kept, _ = run_through(ids, groups, max_tokens=None, **options)
    assert "".join(deltas) == text
    assert (text, kept) == plain_search(ids, stops, min_tokens, include)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 255), max_size=20), group_sizes)
def test_without_stops_the_text_is_that_of_all_tokens(ids, groups):
    text, deltas, kept, stop = run_through(ids, groups)
    assert (text, kept, stop) == (BYTES.decode(ids), len(ids), None)
    assert "".join(deltas) == text
