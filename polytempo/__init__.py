"""Lossless batched inference for the DeepSeek-V4 family: every sequence at its own pace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polytempo.lazy import lazy_attributes

if TYPE_CHECKING:
    from polytempo.async_llm import AsyncLLM
    from polytempo.llm import LLM
    from polytempo.types import CompletionOutput, RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

# Loaded on first use: `polytempo --help` and torch-free tests must not pay for importing torch.
__getattr__ = lazy_attributes(__name__, {
    "AsyncLLM": "polytempo.async_llm",
    "LLM": "polytempo.llm",
    "CompletionOutput": "polytempo.types",
    "RequestOutput": "polytempo.types",
    "SamplingParams": "polytempo.types",
})
