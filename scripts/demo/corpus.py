"""The demo model's text: the Python standard library's own source, its tokenizer and its split."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, USER, ASSISTANT = "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, EOS, USER, ASSISTANT)
HELD_OUT_SHARE = 0.05
# Tables and generated text teach a code model nothing and would fill its vocabulary.
SKIPPED = ("site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "__pycache__")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Corpus:
    """Token streams: every file is BOS, its tokens, EOS. `held_out_files` keeps the files apart."""

    train: np.ndarray
    held_out: np.ndarray
    held_out_files: list[list[int]]
    held_out_bytes: int
    tokenizer: Tokenizer


def read_sources() -> list[tuple[str, str]]:
    """Every source file of the running interpreter's standard library: (relative path, text), sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if any(part in SKIPPED for part in name.parts):
            continue
        try:
            sources.append((name.as_posix(), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return sources


def is_held_out(text: str) -> bool:
    """Whether the hash of a file's text puts it into the held-out share."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with our special tokens at ids 0 …"""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out_dir: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out_dir / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out_dir / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def build_corpus(vocab_size: int) -> Corpus:
    """Read, split by hash, train the tokenizer on the training share, tokenize both shares."""
    sources = [text for _, text in read_sources() if text.strip()]
    train_texts = [text for text in sources if not is_held_out(text)]
    held_out_texts = [text for text in sources if is_held_out(text)]
    tokenizer = train_tokenizer(train_texts, vocab_size)
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)

    def encode(texts: list[str]) -> list[list[int]]:
        return [[bos, *encoding.ids, eos] for encoding in tokenizer.encode_batch(texts)]

    def join(files: list[list[int]]) -> np.ndarray:
        return np.concatenate([np.array(ids, dtype=np.uint16) for ids in files])

    held_out_files = encode(held_out_texts)
    num_bytes = sum(len(text.encode()) for text in held_out_texts)
    return Corpus(join(encode(train_texts)), join(held_out_files), held_out_files, num_bytes, tokenizer)
