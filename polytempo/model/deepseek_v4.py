"""The decoder: blocks over residual streams, the MTP block, and the head. Knows nothing of rows or caches."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polytempo.config import ModelConfig
from polytempo.engine_config import AUTO, NATIVE, TRITON
from polytempo.model.attention import Attention
from polytempo.model.hyper import HyperConnection, HyperHead, collapse, expand
from polytempo.model.moe import MoE
from polytempo.model.native import NativeModel, native_or_none
from polytempo.model.ops import Linear, RMSNorm, by_own_kernels, require_triton

Attend = Callable[[Attention, Tensor], Tensor]
"""How a block attends: (its attention module, normalised input [T, D]) -> output [T, D]."""


class Block(nn.Module):
    """One decoder block: attention, then experts, each between a read from and a write to the streams."""

    def __init__(
        self, config: ModelConfig, ratio: int, is_hash: bool, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.hc_attn = HyperConnection(config, device)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.attn = Attention(config, ratio, dtype, device)
        self.hc_ffn = HyperConnection(config, device)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.ffn = MoE(config, is_hash, dtype, device)

    def forward(self, streams: Tensor, token_ids: Tensor, attend: Attend) -> Tensor:
        """Run the block over T tokens.

        Args:
            streams: [T, hc, D].
            token_ids: [T] int64, read by hash-routed layers only.
            attend: what the attention may see.

        Returns:
            [T, hc, D].
        """
        weights = self.hc_attn(streams)
        output = attend(self.attn, self.attn_norm(collapse(streams, weights.pre)))
        streams = expand(streams, output, weights)
        weights = self.hc_ffn(streams)
        output = self.ffn(self.ffn_norm(collapse(streams, weights.pre)), token_ids)
        return expand(streams, output, weights)


class MTPBlock(Block):
    """The multi-token-prediction block: an ordinary block over (streams of p, token of p + 1).

    Its own norm and hc_head close it; the target's embedding and head are shared.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(config, ratio=0, is_hash=False, dtype=dtype, device=device)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(width, eps, device)
        self.hnorm = RMSNorm(width, eps, device)
        self.e_proj = Linear(width, width, dtype, device)
        self.h_proj = Linear(width, width, dtype, device)
        self.norm = RMSNorm(width, eps, device)
        self.hc_head = HyperHead(config, device)

    def combine(self, streams: Tensor, next_embeddings: Tensor) -> Tensor:
        """e_proj(enorm(embedding of token p + 1)), added to every stream of h_proj(hnorm(streams of p)).

        Args:
            streams: [T, hc, D], the target's last-layer streams before hc_head, or the previous draft's.
            next_embeddings: [T, D].

        Returns:
            [T, hc, D].
        """
        hidden = self.h_proj(self.hnorm(streams).flatten(0, 1)).view_as(streams)
        return hidden + self.e_proj(self.enorm(next_embeddings)).unsqueeze(1)


class Embedding(nn.Module):
    """Token embedding; weight [vocab, D]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device))

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up token_ids (any shape) as [..., D]."""
        return F.embedding(token_ids, self.weight)


class DeepseekV4(nn.Module):
    """Weights of a target and its MTP block, with the steps that do not depend on a cache.

    Parameter names are the official checkpoint's, but for the hyper-connections' dots and the stacked experts.

    Attributes:
        kernels: what runs the cached forward: "auto", "native", "triton" or "torch"; see `EngineConfig`.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.kernels = AUTO
        self._native: NativeModel | bool | None = None  # False: there is none; None: not asked yet
        self.embed = Embedding(config, dtype, device)
        self.layers = nn.ModuleList(
            Block(config, ratio, config.is_hash_layer(layer_idx), dtype, device)
            for layer_idx, ratio in enumerate(config.compress_ratios)
        )
        self.hc_head = HyperHead(config, device)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.head = Linear(config.hidden_size, config.vocab_size, dtype, device)
        self.mtp = nn.ModuleList(MTPBlock(config, dtype, device) for _ in range(config.num_mtp_blocks))

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.embed.weight.device

    def with_kernels(self, choice: str) -> DeepseekV4:
        """A model over the same weights whose cached forward runs in other kernels.

        Args:
            choice: "auto", "native", "triton" or "torch".

        Returns:
            This model if it is its choice already.

        Raises:
            ConfigError: "native" where the kernels cannot be built or do not fit the model, "triton" without Triton
                or a GPU.
        """
        if choice == self.kernels:
            chosen = self
        else:
            chosen = copy.copy(self)
            chosen.kernels, chosen._native = choice, None
        if choice == NATIVE:
            _ = chosen.native
        elif choice == TRITON:
            require_triton(self.device)
        return chosen

    @property
    def native(self) -> NativeModel | None:
        """The C++ kernels over these weights, or None for the torch path; built when first asked for."""
        if self._native is None or (self._native and not self._native.is_current):
            self._native = native_or_none(self, self.kernels) or False
        return self._native or None

    def embed_streams(self, token_ids: Tensor) -> Tensor:
        """Embeddings of token_ids [T], repeated over the streams: [T, hc, D]."""
        return self.embed(token_ids).unsqueeze(1).repeat(1, self.config.hc_mult, 1)

    @by_own_kernels
    def logits(self, streams: Tensor) -> Tensor:
        """Target logits [T, vocab] in the model dtype, from last-layer streams [T, hc, D]."""
        if not torch.is_grad_enabled() and self.native is not None:
            return self.native.logits(streams)
        return self.head(self.norm(self.hc_head(streams)))

    @by_own_kernels
    def mtp_logits(self, streams: Tensor) -> Tensor:
        """MTP logits [T, vocab] in the model dtype, from the MTP block's output streams [T, hc, D]."""
        if not torch.is_grad_enabled() and self.native is not None:
            return self.native.logits(streams, is_mtp=True)
        block = self.mtp[0]
        return self.head(block.norm(block.hc_head(streams)))
