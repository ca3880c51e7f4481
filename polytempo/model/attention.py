"""The attention module of a block: its projections. What a query may see is attention_core's business."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polytempo.config import ModelConfig
from polytempo.model.compressor import OVERLAP_RATIO, Compressor, Indexer
from polytempo.model.ops import Linear, RMSNorm, matmul, unweighted_rms_norm
from polytempo.model.rope import RopeAngles, rotate


class Attention(nn.Module):
    """Low-rank queries, one shared key-value head, grouped low-rank output.

    Layers of ratio 4 and 128 own a `compressor`, layers of ratio 4 an `indexer` too.
    """

    def __init__(
        self, config: ModelConfig, ratio: int, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.ratio = ratio
        self.num_heads, self.head_dim, self.num_groups = config.num_attention_heads, config.head_dim, config.o_groups
        self.scale = self.head_dim**-0.5
        self.norm_eps = config.rms_norm_eps
        width, all_heads = config.hidden_size, self.num_heads * self.head_dim
        self.wq_a = Linear(width, config.q_lora_rank, dtype, device)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps, device)
        self.wq_b = Linear(config.q_lora_rank, all_heads, dtype, device)
        self.wkv = Linear(width, self.head_dim, dtype, device)
        self.kv_norm = RMSNorm(self.head_dim, config.rms_norm_eps, device)
        self.wo_a = Linear(all_heads // self.num_groups, self.num_groups * config.o_lora_rank, dtype, device)
        self.wo_b = Linear(self.num_groups * config.o_lora_rank, width, dtype, device)
        self.attn_sink = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32, device=device))
        if ratio:
            self.compressor = Compressor(config, ratio, config.head_dim, dtype, device)
        if ratio == OVERLAP_RATIO:
            self.indexer = Indexer(config, dtype, device)

    def project_q(self, x: Tensor, angles: RopeAngles) -> tuple[Tensor, Tensor]:
        """Queries of T tokens.

        Args:
            x: [T, D].
            angles: of the tokens' positions.

        Returns:
            q [T, heads, head_dim], normalised and rotated; q_residual [T, q_lora_rank] for the indexer.
        """
        q_residual = self.q_norm(self.wq_a(x))
        q = self.wq_b(q_residual).unflatten(-1, (self.num_heads, self.head_dim))
        return rotate(unweighted_rms_norm(q, self.norm_eps), angles.per_head()), q_residual

    def project_kv(self, x: Tensor, angles: RopeAngles) -> Tensor:
        """The one vector [T, head_dim] per token that serves as key and as value."""
        return rotate(self.kv_norm(self.wkv(x)), angles)

    def project_output(self, heads: Tensor, angles: RopeAngles) -> Tensor:
        """Undo the values' rotation by the query's position, then the grouped low-rank projection.

        Args:
            heads: [T, heads, head_dim], attended values.
            angles: of the tokens' positions.

        Returns:
            [T, D].
        """
        heads = rotate(heads, angles.inverse().per_head())
        grouped = heads.reshape(heads.shape[0], self.num_groups, -1).transpose(0, 1)
        weight = self.wo_a.weight.unflatten(0, (self.num_groups, -1)).transpose(1, 2)
        return self.wo_b(matmul(grouped, weight).transpose(0, 1).flatten(1))
