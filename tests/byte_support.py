"""A tiny random model over bytes, with a tokenizer and a chat template: text without a checkpoint."""

from __future__ import annotations

import functools
from dataclasses import replace

import tokenizers
from support import TINY, random_model
from tokenizers import decoders, models, pre_tokenizers

from polytempo.llm import LLM
from polytempo.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
)


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that text is cut inside characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>", "<|user|>", "<|assistant|>"])
    return Tokenizer(backend, bos_token="<bos>", eos_token="<eos>", add_bos_token=True, chat_template=TEMPLATE)


@functools.cache
def tiny_model(seed: int = 3):
    """Random weights over the bytes and four special tokens; every layer kind, and an MTP block."""
    config = replace(TINY, vocab_size=260, num_hidden_layers=3, compress_ratios=(0, 4, 128), eos_token_ids=(257,),
                     bos_token_id=256)  # fmt: skip
    return random_model(config, seed=seed)


def tiny_llm(**options) -> LLM:
    """An engine of its own over the tiny model."""
    defaults = {"max_rows": 4, "max_model_len": 256, "max_chunk": 32, "queue_limit": 64, "draft_len": 2}
    return LLM.from_model(tiny_model(), byte_tokenizer(), **{**defaults, **options})
