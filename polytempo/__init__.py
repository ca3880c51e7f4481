"""Lossless batched inference for the DeepSeek-V4 family: every sequence at its own pace."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polytempo.async_llm import AsyncLLM
    from polytempo.llm import LLM
    from polytempo.types import CompletionOutput, RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

# Loaded on first use: `polytempo --help` and torch-free tests must not pay for importing torch.
_HOMES = {
    "AsyncLLM": "polytempo.async_llm",
    "LLM": "polytempo.llm",
    "CompletionOutput": "polytempo.types",
    "RequestOutput": "polytempo.types",
    "SamplingParams": "polytempo.types",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
