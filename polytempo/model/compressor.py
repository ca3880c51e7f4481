"""Compressor and indexer: how spans of tokens become entries, and which entries a query reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polytempo.config import ModelConfig
from polytempo.model.ops import Linear, RMSNorm, matmul, serial_sum, tree_sum
from polytempo.model.rope import RopeAngles, rotate

OVERLAP_RATIO = 4


class Compressor(nn.Module):
    """Pools a span of `ratio` tokens into one entry of `head_dim` channels.

    With overlap (ratio 4) the projections are 2 · head_dim wide: an entry reads the first half-series of the
    span before its own and the second half-series of its own. Parameters: wkv, wgate [width, D] in the model
    dtype, ape [ratio, width] and norm [head_dim] in float32.
    """

    def __init__(
        self, config: ModelConfig, ratio: int, head_dim: int, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.ratio, self.head_dim, self.overlap = ratio, head_dim, ratio == OVERLAP_RATIO
        width = head_dim * (2 if self.overlap else 1)
        self.wkv = Linear(config.hidden_size, width, dtype, device)
        self.wgate = Linear(config.hidden_size, width, dtype, device)
        self.ape = nn.Parameter(torch.empty(ratio, width, dtype=torch.float32, device=device))
        self.norm = RMSNorm(head_dim, config.rms_norm_eps, device)

    @property
    def num_inputs(self) -> int:
        """Tokens that one entry reads: its span, and with overlap the span before."""
        return self.ratio * (2 if self.overlap else 1)

    def pool(self, kv: Tensor, gate: Tensor, entry_ids: Tensor) -> Tensor:
        """Make entries from the projections of the tokens that they read.

        Args:
            kv: [N, num_inputs, width], wkv of the tokens in ascending position.
            gate: [N, num_inputs, width], wgate of the same tokens.
            entry_ids: [N] int64; entry 0 has no span before it, and what stands there is ignored.

        Returns:
            [N, head_dim] float32, normalised, not rotated yet.
        """
        kv, gate = kv.float(), gate.float()
        if self.overlap:
            ratio, half = self.ratio, self.head_dim
            gate = gate + self.ape.repeat(2, 1)
            is_first = (entry_ids == 0).view(-1, 1, 1)
            before = gate[:, :ratio, :half].masked_fill(is_first, -torch.inf)
            # 0 · NaN is NaN: a weight of 0 is not enough to ignore what stands before entry 0.
            kv_before = kv[:, :ratio, :half].masked_fill(is_first, 0.0)
            gate = torch.cat((before, gate[:, ratio:, half:]), dim=1)
            kv = torch.cat((kv_before, kv[:, ratio:, half:]), dim=1)
        else:
            gate = gate + self.ape
        weights = torch.exp(gate - gate.amax(1, keepdim=True))
        return self.norm(tree_sum(weights * kv, 1) / tree_sum(weights, 1))

    def entries(self, kv: Tensor, gate: Tensor, entry_ids: Tensor, table: RopeAngles) -> Tensor:
        """`pool`, then RoPE at each entry's first position, entry · ratio: [N, head_dim] float32."""
        return rotate(self.pool(kv, gate, entry_ids), table.at(entry_ids * self.ratio))


class Indexer(nn.Module):
    """Scores the entries of a ratio-4 layer for each query and keeps the best `index_topk`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.top_k = config.index_topk
        self.scale = self.num_heads**-0.5 * self.head_dim**-0.5
        self.wq_b = Linear(config.q_lora_rank, self.num_heads * self.head_dim, dtype, device)
        self.weights_proj = Linear(config.hidden_size, self.num_heads, dtype, device)
        self.compressor = Compressor(config, OVERLAP_RATIO, self.head_dim, dtype, device)

    def queries(self, x: Tensor, q_residual: Tensor, angles: RopeAngles) -> tuple[Tensor, Tensor]:
        """Index queries of T tokens.

        Args:
            x: [T, D], the attention's input.
            q_residual: [T, q_lora_rank], norm(wq_a x).
            angles: of the tokens' positions, compress base.

        Returns:
            queries [T, index_n_heads, index_head_dim] and head weights [T, index_n_heads] float32, scaled.
        """
        queries = self.wq_b(q_residual).unflatten(-1, (self.num_heads, self.head_dim))
        return rotate(queries, angles.per_head()), self.weights_proj(x).float() * self.scale

    def scores(self, queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """Σ_h weight_h · ReLU(query_h · key), float32.

        Args:
            queries: [B, M, heads, index_head_dim].
            weights: [B, M, heads] float32.
            keys: [B, E, index_head_dim].

        Returns:
            [B, M, E] float32.
        """
        num_queries = queries.shape[1]
        dots = matmul(queries.flatten(1, 2).float(), keys.float().transpose(1, 2))
        dots = dots.unflatten(1, (num_queries, self.num_heads))
        return serial_sum(dots.clamp(min=0.0) * weights.unsqueeze(-1), 2)


def choose_entries(scores: Tensor, num_visible: Tensor, top_k: int) -> Tensor:
    """Ascending ids of the entries that each query keeps.

    Whether a query chooses depends on its own count of visible entries alone; equal scores keep the lowest
    entry, however many columns there are.

    Args:
        scores: [..., E] float32; columns at or past num_visible are ignored.
        num_visible: [...] int64, entries that each query may see.
        top_k: most entries to keep (config field `index_topk`).

    Returns:
        [..., min(top_k, E)] int64, ascending; unused places hold E.
    """
    num_entries = scores.shape[-1]
    columns = torch.arange(num_entries, device=scores.device)
    hidden = columns >= num_visible.unsqueeze(-1)
    ranked = scores.masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    kept = ranked[..., :top_k]
    kept = kept.masked_fill(kept >= num_visible.unsqueeze(-1), num_entries)
    return kept.sort(dim=-1).values
