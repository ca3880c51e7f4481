"""Seeded prompts for benchmarks: slices of the running Python's own standard library."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from polytempo.errors import RequestError
from polytempo.tokenizer import Tokenizer

FILES = ("argparse.py", "ast.py", "dataclasses.py", "difflib.py", "inspect.py", "subprocess.py", "typing.py")


def prompts(
    tokenizer: Tokenizer | None, vocab_size: int, lengths: Sequence[int], count: int, seed: int
) -> list[list[int]]:
    """Token prompts of mixed lengths.

    Args:
        tokenizer: encodes source text; None gives random ids, which no drafter foresees.
        vocab_size: bounds the random ids.
        lengths: prompt lengths in tokens, taken in turn.
        count: how many prompts.
        seed: which slices.

    Returns:
        `count` lists of token ids.

    Raises:
        RequestError: a length is longer than the text.
    """
    generator = random.Random(seed)
    if tokenizer is None:
        return [
            [generator.randrange(2, vocab_size) for _ in range(lengths[place % len(lengths)])] for place in range(count)
        ]
    root = Path(sysconfig.get_paths()["stdlib"])
    text = "\n".join((root / name).read_text(encoding="utf-8") for name in FILES if (root / name).exists())
    ids = tokenizer.encode(text, add_special_tokens=False)
    if max(lengths) >= len(ids):
        raise RequestError(f"prompt length {max(lengths)} is too long; the benchmark's text has {len(ids)} tokens")
    starts = [generator.randrange(len(ids) - max(lengths)) for _ in range(count)]
    return [ids[start : start + lengths[place % len(lengths)]] for place, start in enumerate(starts)]
