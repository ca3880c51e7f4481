"""Attention of packed tokens over their rows' state: write, complete entries, then attend tile by tile.

One softmax runs over [window ++ entries] with the sink in its denominator. Keys are reduced in aligned blocks,
in ascending order; a fully masked block adds exact zeros. So a query's result is a function of its own row
and position, not of its chunk, its tile or its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polytempo import gpu
from polytempo.cache.layout import BLOCK
from polytempo.cache.store import LayerState, PooledState
from polytempo.cache.view import BatchView, TileGroup, num_entry_blocks
from polytempo.model.attention import Attention
from polytempo.model.caller_mask import tile_mask
from polytempo.model.compressor import Compressor, choose_entries
from polytempo.model.ops import matmul, tree_sum, uses_triton
from polytempo.model.rope import RopeAngles, RopeTables


@dataclass(frozen=True)
class CachedAttention:
    """How one layer of one forward attends.

    Attributes:
        state: the layer's part of the row store.
        view: the forward's tokens.
        tables: RoPE.
        caller_mask: None, or a checked additive mask over raw keys [B or 1, H or 1, T_q, K].
    """

    state: LayerState
    view: BatchView
    tables: RopeTables
    caller_mask: Tensor | None = None

    def __call__(self, attn: Attention, x: Tensor) -> Tensor:
        """Attend: x [T, D], normalised, to [T, D]; writes the tokens' keys and completed entries."""
        view, state = self.view, self.state
        table = self.tables.for_ratio(attn.ratio)
        angles = table.at(view.positions)
        q, q_residual = attn.project_q(x, angles)
        write_window(state.window, view, attn.project_kv(x, angles))
        if attn.ratio:
            self._write_entries(state.compressed, attn.compressor, x, table)
        index_queries = None
        if state.index is not None:
            self._write_entries(state.index, attn.indexer.compressor, x, table)
            index_queries = attn.indexer.queries(x, q_residual, angles)
        heads = torch.empty_like(q)
        for group in view.groups:
            attended = self._attend_group(attn, group, q, index_queries)
            heads[group.kept_token_idx] = attended.flatten(0, 1)[group.kept].to(q.dtype)
        return attn.project_output(heads, angles)

    def _write_entries(self, pooled: PooledState, compressor: Compressor, x: Tensor, table: RopeAngles) -> None:
        """Keep the tokens' compressor inputs, and make the entries whose spans they complete."""
        write_ring(pooled.kv, self.view, compressor.wkv(x))
        write_ring(pooled.gate, self.view, compressor.wgate(x))
        completed = self.view.completed[compressor.ratio]
        if completed.entry_ids.numel():
            cells = completed.input_positions % pooled.kv.shape[1]
            slots = completed.slots.unsqueeze(1)
            entries = compressor.entries(pooled.kv[slots, cells], pooled.gate[slots, cells], completed.entry_ids, table)
            blocks = self.view.block_tables[compressor.ratio][completed.slots, completed.entry_ids // BLOCK]
            pooled.entries[blocks, completed.entry_ids % BLOCK] = entries.to(pooled.entries.dtype)

    def _attend_group(
        self, attn: Attention, group: TileGroup, q: Tensor, index_queries: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Attended values [N, Q, heads, head_dim] float32 of one tile group."""
        queries = q[group.token_idx]
        window_keys = self.state.window[group.slots.unsqueeze(1), group.key_cells]
        bias = None if self.caller_mask is None else tile_mask(self.caller_mask, self.view, group)
        blocks = [_Blocks(window_keys, group.window_mask, bias)]
        if attn.ratio and self.view.max_visible[attn.ratio]:
            if index_queries is not None and self.view.max_visible[attn.ratio] > attn.indexer.top_k:
                blocks.append(self._chosen_entries(attn, group, index_queries))
            else:
                entries = self._visible(self.state.compressed, attn.ratio, group)
                num_visible = (group.positions + 1) // attn.ratio
                mask = torch.arange(entries.shape[1], device=q.device) < num_visible.unsqueeze(-1)
                blocks.append(_Blocks(entries, mask))
        return attend_blocks(queries, blocks, attn.attn_sink, attn.scale)

    def _visible(self, pooled: PooledState, ratio: int, group: TileGroup) -> Tensor:
        """Every tile's entries [N, columns, head_dim], in whole blocks that cover what any query of the batch sees."""
        blocks = self.view.block_tables[ratio][:, : num_entry_blocks(self.view.max_visible[ratio])]
        return pooled.entries[blocks[group.slots]].flatten(1, 2)

    def _chosen_entries(self, attn: Attention, group: TileGroup, index_queries: tuple[Tensor, Tensor]) -> _Blocks:
        """Every query's own entries, in columns by rank.

        A query that keeps all its entries meets them in the columns that they have in a tile that shares them.
        """
        kept = self._choose(attn, group, index_queries)
        table = self.view.block_tables[attn.ratio]
        is_kept = kept >= 0
        kept = kept.clamp(min=0)
        blocks = table[group.slots.view(-1, 1, 1), kept // BLOCK]
        return _Blocks(self.state.compressed.entries[blocks, kept % BLOCK], is_kept)

    def _choose(self, attn: Attention, group: TileGroup, index_queries: tuple[Tensor, Tensor]) -> Tensor:
        """Entry ids [N, Q, columns] that each query keeps, ascending; unused columns hold −1."""
        keys = self._visible(self.state.index, attn.ratio, group)
        vectors, weights = (part[group.token_idx] for part in index_queries)
        scores = attn.indexer.scores(vectors, weights, keys)
        kept = choose_entries(scores, (group.positions + 1) // attn.ratio, attn.indexer.top_k)
        kept = kept.masked_fill(kept == keys.shape[1], -1)
        return torch.nn.functional.pad(kept, (0, -kept.shape[-1] % BLOCK), value=-1)


@dataclass(frozen=True)
class _Blocks:
    """Keys in whole blocks of columns, and who sees them.

    Attributes:
        keys: [N, C, head_dim] if the queries of a tile share them, [N, Q, C, head_dim] if each has its own.
        mask: [N or 1, Q, C] bool, True where the query sees the key.
        bias: None, or what a caller adds to the scores, [N, Q, heads or 1, C].
    """

    keys: Tensor
    mask: Tensor
    bias: Tensor | None = None

    def scores(self, queries: Tensor, scale: float) -> Tensor:
        """Scaled scores [N, Q, heads, C] float32 of queries [N, Q, heads, head_dim]; −∞ where masked."""
        scores = self.multiply(queries, self.keys.transpose(-1, -2)) * scale
        if self.bias is not None:
            scores = scores + self.bias
        return scores.masked_fill(~self.mask.unsqueeze(2), -torch.inf)

    def multiply(self, rows: Tensor, keys: Tensor) -> Tensor:
        """rows [N, Q, heads, K] times keys (this set's, or a part of them, K first): [N, Q, heads, …] float32."""
        if self.keys.dim() == 3:
            return matmul(rows.flatten(1, 2), keys).float().unflatten(1, rows.shape[1:3])
        return matmul(rows.flatten(0, 1), keys.flatten(0, 1)).float().unflatten(0, rows.shape[:2])


def write_window(window: Tensor, view: BatchView, keys: Tensor) -> None:
    """Put raw keys [T, head_dim] of the view's tokens into their cells [slots, cells, head_dim]."""
    window[view.slots, view.window_cells] = keys


def write_ring(ring: Tensor, view: BatchView, values: Tensor) -> None:
    """Put values [T, …] of the view's tokens into their cells of a ring [slots, cells, …]."""
    ring[view.slots, view.positions % ring.shape[1]] = values


def attend_blocks(queries: Tensor, parts: list[_Blocks], sink: Tensor, scale: float) -> Tensor:
    """One softmax over all parts with a sink, reduced block by block in ascending order.

    The maximum is exact in any order; the denominator starts from the sink and adds one block's tree sum at a
    time, and so do the values. Masked columns weigh exactly 0.

    Args:
        queries: [N, Q, heads, head_dim].
        parts: key sets in reduction order; every mask row may be empty, the sink keeps the softmax defined.
        sink: [heads] float32, a logit without a value (config: `attn_sink`).
        scale: of the scores, head_dim ** −0.5.

    Returns:
        [N, Q, heads, head_dim] float32.
    """
    is_plain = queries.dtype == torch.bfloat16 and all(part.bias is None for part in parts)
    if is_plain and uses_triton(queries):
        return gpu.attend(queries, [(part.keys, part.mask) for part in parts], sink, scale)
    scores = []
    highest = sink.expand(queries.shape[:3])
    for part in parts:
        scores.append(part.scores(queries, scale))
        highest = torch.maximum(highest, scores[-1].amax(-1))
    total = torch.exp(sink - highest)
    values = None
    for part, score in zip(parts, scores, strict=True):
        weights = torch.exp(score - highest.unsqueeze(-1)).unflatten(-1, (-1, BLOCK))
        sums = tree_sum(weights, 4)
        weights = weights.to(part.keys.dtype)
        for block_idx in range(weights.shape[3]):
            total = total + sums[..., block_idx]
            keys = part.keys.narrow(-2, block_idx * BLOCK, BLOCK)
            block = part.multiply(weights[..., block_idx, :], keys)
            values = block if values is None else values + block
    return values / total.unsqueeze(-1)
