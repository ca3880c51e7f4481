"""Whole sequences at once, without a cache, differentiable.

Trains the demo model, and is a second, dense way through the same weights that tests compare the cached
forward with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from polytempo.model.attention import Attention
from polytempo.model.compressor import choose_entries
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.rope import RopeTables


@dataclass
class FullSequenceAttention:
    """Dense causal attention over B sequences of S tokens, all starting at position 0.

    Attributes:
        batch, length: B and S.
        tables: RoPE over at least S + max(shift) positions.
        window: config field `sliding_window`.
        drafted_kv: keys of drafted pairs, oldest first; see `mtp_streams`.
        target_kv: keys of the target's pairs, when drafted pairs follow them.
        indexer_losses: gathers one KL term per ratio-4 layer when `with_indexer_loss`.
        own_kv: keys that the last call computed.
    """

    batch: int
    length: int
    tables: RopeTables
    window: int
    target_kv: Tensor | None = None
    drafted_kv: list[Tensor] = field(default_factory=list)
    with_indexer_loss: bool = False
    indexer_losses: list[Tensor] = field(default_factory=list)
    own_kv: Tensor | None = None

    def __call__(self, attn: Attention, x: Tensor) -> Tensor:
        """Attend: x [B·S, D] to [B·S, D]."""
        batch, length = self.batch, self.length
        positions = torch.arange(length, device=x.device)
        angles = self.tables.for_ratio(attn.ratio).at(positions.repeat(batch))
        q, q_residual = attn.project_q(x, angles)
        own_kv = self.own_kv = attn.project_kv(x, angles).unflatten(0, (batch, length))
        q = q.unflatten(0, (batch, length))
        kv = own_kv if self.target_kv is None else self.target_kv
        scores, values = self._window_scores(q * attn.scale, kv)
        scores = [scores]
        if self.target_kv is not None:
            self.drafted_kv.append(own_kv)
            scores.append(self._drafted_scores(q * attn.scale))
        if attn.ratio and length >= attn.ratio:
            entries, entry_scores = self._entry_scores(attn, x, q, q_residual)
            scores.append(entry_scores)
        sink = attn.attn_sink.expand(batch, length, -1).unsqueeze(-1)
        weights = torch.cat((*scores, sink), dim=-1).softmax(-1).to(kv.dtype)
        heads = self._window_values(weights[..., : 2 * self.window], values)
        if self.target_kv is not None:
            heads = heads + self._drafted_values(weights[..., 2 * self.window : -1])
        elif attn.ratio and length >= attn.ratio:
            heads = heads + torch.matmul(weights[..., 2 * self.window : -1].flatten(1, 2), entries).view_as(heads)
        return attn.project_output(heads.flatten(0, 1).to(x.dtype), angles)

    def _tiles(self, x: Tensor) -> Tensor:
        """Pad the length of x [B, S, …] to whole tiles of one window: [B, tiles, window, …]."""
        missing = -self.length % self.window
        padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
        return padded.unflatten(1, (-1, self.window))

    def _window_scores(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [B, S, heads, 2·window] over the tile before and the query's own, and the tiled keys."""
        window = self.window
        q_tiles, kv_tiles = self._tiles(q), self._tiles(kv.to(q.dtype))
        before = F.pad(kv_tiles, (0, 0, 0, 0, 1, 0))[:, :-1]
        keys = torch.cat((before, kv_tiles), dim=2)
        scores = torch.matmul(q_tiles.flatten(2, 3), keys.transpose(2, 3)).float()
        scores = scores.unflatten(2, (window, -1)).flatten(1, 2)[:, : self.length]
        query = torch.arange(self.length, device=q.device).view(-1, 1)
        column = query // window * window - window + torch.arange(2 * window, device=q.device)
        # A drafted chain of depth d sees the target's keys up to d positions back only.
        newest = query - (0 if self.target_kv is None else 1 + len(self.drafted_kv))
        seen = (column >= 0) & (column > query - window) & (column <= newest)
        return scores.masked_fill(~seen.unsqueeze(1), -torch.inf), keys

    def _window_values(self, weights: Tensor, keys: Tensor) -> Tensor:
        tiles = self._tiles(weights.flatten(2)).unflatten(3, weights.shape[2:])
        heads = torch.matmul(tiles.flatten(2, 3), keys.to(weights.dtype))
        return heads.unflatten(2, (self.window, -1)).flatten(1, 2)[:, : self.length]

    def _drafted(self) -> Tensor:
        """Keys of the drafted pairs that each query sees: [B, S, depth, head_dim], oldest first."""
        depth = len(self.drafted_kv)
        shifted = [F.pad(kv, (0, 0, depth - 1 - i, 0))[:, : self.length] for i, kv in enumerate(self.drafted_kv)]
        return torch.stack(shifted, dim=2)

    def _drafted_scores(self, q: Tensor) -> Tensor:
        return torch.matmul(q, self._drafted().to(q.dtype).transpose(2, 3)).float()

    def _drafted_values(self, weights: Tensor) -> Tensor:
        return torch.matmul(weights, self._drafted().to(weights.dtype))

    def _entry_scores(self, attn: Attention, x: Tensor, q: Tensor, q_residual: Tensor) -> tuple[Tensor, Tensor]:
        """Entries [B, E, head_dim] and their masked scores [B, S, heads, E]."""
        table = self.tables.for_ratio(attn.ratio)
        entries = self._entries(attn.compressor, x, table).to(q.dtype)
        num_visible = (torch.arange(self.length, device=x.device) + 1) // attn.ratio
        hidden = torch.arange(entries.shape[1], device=x.device) >= num_visible.unsqueeze(-1)
        keys = entries.transpose(1, 2)
        scores = torch.matmul((q * attn.scale).flatten(1, 2), keys).unflatten(1, (self.length, -1)).float()
        visible = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
        if not hasattr(attn, "indexer"):
            return entries, visible
        kept = self._indexer(attn, x, q_residual, visible, num_visible)
        return entries, visible.masked_fill(~kept.unsqueeze(2), -torch.inf)

    def _entries(self, compressor, x: Tensor, table) -> Tensor:
        batch, ratio = self.batch, compressor.ratio
        num_entries = self.length // ratio
        spans = []
        for projection in (compressor.wkv(x), compressor.wgate(x)):
            span = projection.unflatten(0, (batch, self.length))[:, : num_entries * ratio]
            span = span.unflatten(1, (num_entries, ratio))
            if compressor.overlap:
                before = F.pad(span, (0, 0, 0, 0, 1, 0))[:, :-1]
                span = torch.cat((before, span), dim=2)
            spans.append(span.flatten(0, 1))
        entry_ids = torch.arange(num_entries, device=x.device).repeat(batch)
        return compressor.entries(*spans, entry_ids, table).unflatten(0, (batch, num_entries))

    def _indexer(self, attn: Attention, x: Tensor, q_residual: Tensor, visible: Tensor, num_visible: Tensor):
        """Which entries each query keeps, [B, S, E] bool; the KL term trains the indexer towards attention.

        The language-model loss gives the indexer no gradient through the choice. Its target is the attention
        mass that the heads would put on the visible entries, and its inputs are detached.
        """
        indexer = attn.indexer
        x, q_residual = x.detach(), q_residual.detach()
        table = self.tables.for_ratio(attn.ratio)
        angles = table.at(torch.arange(self.length, device=x.device).repeat(self.batch))
        queries, weights = indexer.queries(x, q_residual, angles)
        keys = self._entries(indexer.compressor, x, table).to(queries.dtype)
        shape = (self.batch, self.length)
        scores = indexer.scores(queries.unflatten(0, shape), weights.unflatten(0, shape), keys)
        if self.with_indexer_loss:
            self.indexer_losses.append(_attention_kl(visible, scores, num_visible))
        num_entries = scores.shape[-1]
        kept = choose_entries(scores.detach(), num_visible.expand(shape), indexer.top_k)
        marks = torch.zeros(*shape, num_entries + 1, dtype=torch.bool, device=x.device)
        return marks.scatter_(-1, kept, True)[..., :num_entries]


def _attention_kl(visible: Tensor, scores: Tensor, num_visible: Tensor) -> Tensor:
    """Mean over queries of KL(attention mass on entries ‖ softmax of index scores)."""
    rows = num_visible > 1
    hidden = torch.isinf(visible[:, rows, 0])
    mass = visible[:, rows].detach().softmax(-1).mean(2)
    index_logprobs = scores[:, rows].masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(hidden, 0.0)
    return (torch.xlogy(mass, mass) - mass * index_logprobs).sum(-1).mean()


@dataclass(frozen=True)
class FullSequenceOutput:
    """Result of `full_forward`: streams [B, S, hc, D] after the last layer, and the indexers' KL terms."""

    streams: Tensor
    indexer_losses: Sequence[Tensor]


def full_forward(
    model: DeepseekV4, token_ids: Tensor, tables: RopeTables, with_indexer_loss: bool = False
) -> FullSequenceOutput:
    """Run the target over whole sequences.

    Args:
        model: the weights.
        token_ids: [B, S] int64, every sequence from position 0.
        tables: RoPE over at least S positions.
        with_indexer_loss: also compute what trains the indexers.

    Returns:
        Last-layer streams and indexer losses; `model.logits(streams.flatten(0, 1))` gives logits.
    """
    batch, length = token_ids.shape
    attend = FullSequenceAttention(
        batch, length, tables, model.config.sliding_window, with_indexer_loss=with_indexer_loss
    )
    flat_ids = token_ids.flatten()
    streams = model.embed_streams(flat_ids)
    for layer in model.layers:
        streams = layer(streams, flat_ids, attend)
    return FullSequenceOutput(streams.unflatten(0, (batch, length)), attend.indexer_losses)


def full_mtp_chain(
    model: DeepseekV4, streams: Tensor, token_ids: Tensor, tables: RopeTables, depth: int
) -> list[Tensor]:
    """Teacher-forced MTP streams of drafts 1 … depth from every position, as drafting would compute them.

    Draft d from position p runs the block at position p + d − 1 over (streams of draft d − 1, token p + d). It
    sees the target's pairs up to p, and the drafted pairs of its own chain after that.

    Args:
        model: weights with an MTP block.
        streams: [B, S, hc, D], the target's.
        token_ids: [B, S] int64, the tokens that the streams belong to.
        tables: RoPE over at least S positions.
        depth: drafts per chain, at least 1.

    Returns:
        One [B, S − d, hc, D] per draft d; index p is the chain that starts at position p.
    """
    block, window = model.mtp[0], model.config.sliding_window
    batch, length = token_ids.shape[0], token_ids.shape[1] - 1
    chain: list[Tensor] = []
    drafted_kv: list[Tensor] = []
    target_kv: Tensor | None = None
    previous = streams[:, :length]
    for draft_idx in range(depth):
        # Column c of `previous` holds the streams of draft d − 1 at block position c.
        next_ids = token_ids[:, 1 : length + 1]
        attend = FullSequenceAttention(batch, length, tables, window, target_kv, drafted_kv)
        inputs = block.combine(previous.flatten(0, 1), model.embed(next_ids.flatten()))
        output = block(inputs, next_ids.flatten(), attend).unflatten(0, (batch, length))
        if draft_idx == 0:
            target_kv = attend.own_kv
        chain.append(output[:, draft_idx:])
        # The streams of draft d at block position c feed draft d + 1 at block position c + 1.
        previous = F.pad(output, (0, 0, 0, 0, 1, 0))[:, :length]
    return chain
