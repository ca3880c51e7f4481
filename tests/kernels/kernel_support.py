"""Single parts of a block through the C++ kernels, on the tensors that their torch twins take."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch
from support import TINY, Harness, random_model
from torch import Tensor

from polytempo.cache.layout import Segment
from polytempo.kernels.structs import Tokens
from polytempo.model import native

ODD = replace(
    TINY, hidden_size=72, moe_intermediate_size=40, num_attention_heads=15, head_dim=44, qk_rope_head_dim=12,
    q_lora_rank=36, o_groups=3, o_lora_rank=20, n_routed_experts=13, num_experts_per_tok=3, index_n_heads=7,
    index_head_dim=28, hc_mult=4,
)  # fmt: skip
"""No width is a multiple of 16, 32 or 64: every kernel meets its tails."""
CONFIGS = {"tiny": TINY, "odd": ODD}
DTYPES = (torch.float32, torch.bfloat16)


def random_streams(model, count: int, seed: int = 0) -> Tensor:
    """Streams [count, hc, D] in the model's dtype."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, model.config.hc_mult, model.config.hidden_size)
    return torch.randn(shape, generator=generator).to(model.dtype)


class Parts:
    """The parts of one layer.

    Args:
        model: any.
        layer_idx: which layer.
        threads: of every call.
    """

    def __init__(self, model, layer_idx: int, threads: int = 1) -> None:
        self.model, self.block, self.threads = model, model.layers[layer_idx], threads
        self.kernels = native.NativeModel(native.load(), model)
        self.library, self.layer = self.kernels.library, self.kernels.layers[layer_idx]

    def tokens(self, count: int, ids: Tensor | None = None) -> Tokens:
        """A forward of `count` tokens without state."""
        pointer = None if ids is None else ids.data_ptr()
        return Tokens(count=count, ids=pointer, is_bf16=self.model.dtype == torch.bfloat16, threads=self.threads)

    def site(self, streams: Tensor, which: str = "attn") -> tuple[Tensor, Tensor, Tensor]:
        """x [T, D], post [T, hc], comb [T, hc, hc] of a site."""
        count, hc, width = streams.shape
        x, post, comb = streams.new_empty(count, width), torch.empty(count, hc), torch.empty(count, hc, hc)
        site = getattr(self.layer, f"{which}_site")
        self._call("pt_site", ctypes.byref(site), ctypes.byref(self.tokens(count)), streams, x, post, comb)
        return x, post, comb

    def expand(self, streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """New streams [T, hc, D]."""
        to = torch.empty_like(streams)
        self._call("pt_expand", ctypes.byref(self.tokens(len(streams))), streams, output, post, comb, to)
        return to

    def moe(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """Experts of x [T, D]."""
        y = torch.empty_like(x)
        self._call("pt_moe", ctypes.byref(self.tokens(len(x), token_ids)), x, y)
        return y

    def _call(self, name: str, *arguments) -> None:
        pointers = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        getattr(self.library, name)(ctypes.byref(self.layer), *pointers)


def model_of(config_name: str, dtype: torch.dtype, seed: int = 3):
    """A random model, float32 weights rounded to bfloat16 so that both dtypes compute with the same numbers."""
    model = random_model(CONFIGS[config_name], seed=seed, dtype=torch.bfloat16)
    return model if dtype == torch.bfloat16 else widened(model)


def widened(model):
    """The same weights in float32, as an own model."""
    from polytempo.model.deepseek_v4 import DeepseekV4

    wide = DeepseekV4(model.config, torch.float32)
    wide.load_state_dict(model.state_dict())
    return wide.requires_grad_(False)


def logits_of(model, kernels: str, ids: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Logits [len(ids), vocab] of one row fed in chunks."""
    return Harness(model.with_kernels(kernels)).prefill(ids, sizes)


def segments_of(streams: Sequence[Sequence[int]], start: int, end: int) -> list[Segment]:
    """One segment per row, slot by place."""
    return [Segment(slot, start, ids[start:end]) for slot, ids in enumerate(streams)]
