"""Token sequences that must not be completed, found in one lookup per length however many they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from polytempo.errors import RequestError


@dataclass(frozen=True, eq=False)
class BadWords:
    """Sequences by what comes before their last token. Equal to itself alone: comparing all would cost more.

    Attributes:
        last_ids: number of tokens before the last -> {these tokens: ids that may not follow them}.
    """

    last_ids: Mapping[int, Mapping[tuple[int, ...], frozenset[int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]]) -> BadWords:
        """From sequences of at least one token each."""
        found: dict[int, dict[tuple[int, ...], set[int]]] = {}
        for *before, last in sequences:
            found.setdefault(len(before), {}).setdefault(tuple(before), set()).add(last)
        return cls({width: {key: frozenset(ids) for key, ids in of.items()} for width, of in found.items()})

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.last_ids)

    def banned_after(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> set[int]:
        """Ids that would complete a sequence after these tokens, of which prompt and output count alike."""
        banned: set[int] = set()
        for width, last_ids in self.last_ids.items():
            tail = list(output_token_ids[-width:]) if width else []
            missing = width - len(tail)
            if missing:
                tail = list(prompt_token_ids[-missing:]) + tail
            banned |= last_ids.get(tuple(tail), frozenset())
        return banned


def bad_word_token_ids(
    words: Iterable[str], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Token sequences of bad words, each word as it stands and after a space.

    Args:
        words: the strings of SamplingParams.bad_words.
        encode: text -> token ids without special tokens.

    Returns:
        Distinct sequences. One that merely puts tokens before another is left out: the other bans it already.

    Raises:
        RequestError: a word has no tokens.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        bare, spaced = tuple(encode(word)), tuple(encode(" " + word.lstrip(" ")))
        if not bare:
            raise RequestError(f"SamplingParams bad_words={word!r} is refused; the tokenizer has no tokens for it")
        sequences += [bare] if spaced[-len(bare) :] == bare else [bare, spaced]
    return tuple(dict.fromkeys(sequences))
