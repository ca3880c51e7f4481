"""What compile.py compiles: the small chains of a block as functions, and a forward that calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from unittest import mock

import torch
import torch.nn.functional as F
from kernels import CHUNK, CONTEXT, Setup
from torch import Tensor, nn

from polytempo.cache.layout import Segment
from polytempo.cache.view import BatchView
from polytempo.model.attention import Attention
from polytempo.model.cached_attention import CachedAttention
from polytempo.model.deepseek_v4 import Block, DeepseekV4
from polytempo.model.hyper import HyperConnection, HyperHead, StreamWeights, collapse, expand
from polytempo.model.moe import Gate
from polytempo.model.ops import RMSNorm, matmul, swiglu, unweighted_rms_norm
from polytempo.model.rope import RopeAngles, rotate

MOST_ROWS = 128
route = Gate.forward  # held before it is replaced


def read(site: HyperConnection, norm: RMSNorm, streams: Tensor) -> tuple[Tensor, StreamWeights]:
    """An mHC site up to the block's input: norm, projection, Sinkhorn, collapse, RMSNorm."""
    weights = site(streams)
    return norm(collapse(streams, weights.pre)), weights


def close(site: HyperHead, norm: RMSNorm, streams: Tensor) -> Tensor:
    """The head's site and the last norm."""
    return norm(site(streams))


def norm_only(norm: RMSNorm, x: Tensor) -> Tensor:
    """RMSNorm between two projections."""
    return norm(x)


def turn_queries(q: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """RMSNorm and RoPE of q [T, heads, head_dim]."""
    return rotate(unweighted_rms_norm(q, eps), RopeAngles(cos, sin).per_head())


def turn_keys(norm: RMSNorm, kv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RMSNorm and RoPE of keys [T, head_dim]."""
    return rotate(norm(kv), RopeAngles(cos, sin))


def turn_back(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The opposite rotation of attended values [T, heads, head_dim]."""
    return rotate(heads, RopeAngles(cos, sin).inverse().per_head())


# "swiglu" is measured alone: a step calls it once per chosen expert, and each call costs more than eager torch's.
FUNCTIONS: dict[str, Callable] = {
    "read": read, "expand": expand, "close": close, "norm": norm_only, "queries": turn_queries, "keys": turn_keys,
    "back": turn_back, "route": route, "swiglu": swiglu,
}  # fmt: skip


def apart(function: Callable) -> Callable:
    """The same function over code of its own: torch keeps a code's graphs, whoever asked for them."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)


class Chains:
    """The chains under torch.compile, and a forward that is eager but for them.

    Args:
        multiple: rows are padded to a multiple of this many before they enter a chain; 1 for none.
    """

    def __init__(self, multiple: int = 1) -> None:
        self.multiple = multiple
        self.call = {name: torch.compile(apart(function), dynamic=True) for name, function in FUNCTIONS.items()}

    def pad(self, x: Tensor) -> Tensor:
        """Zero rows [T, …] up to the next multiple."""
        missing = -x.shape[0] % self.multiple
        return x if not missing else F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))

    def on_rows(self, name: str, *tensors: Tensor, first: tuple = (), last: tuple = ()) -> Tensor:
        """A chain over tensors whose first dimension is the rows, between its other arguments."""
        count = tensors[0].shape[0]
        return self.call[name](*first, *map(self.pad, tensors), *last)[:count]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, the package's torch modules call the compiled chains."""
        chains = self

        def block(self: Block, streams: Tensor, token_ids: Tensor, attend: Callable) -> Tensor:
            count = token_ids.shape[0]
            x, weights = chains.call["read"](self.hc_attn, self.attn_norm, streams)
            streams = chains.call["expand"](streams, chains.pad(attend(self.attn, x[:count])), weights)
            x, weights = chains.call["read"](self.hc_ffn, self.ffn_norm, streams)
            return chains.call["expand"](streams, chains.pad(self.ffn(x[:count], token_ids)), weights)

        def project_q(self: Attention, x: Tensor, angles: RopeAngles) -> tuple[Tensor, Tensor]:
            residual = chains.on_rows("norm", self.wq_a(x), first=(self.q_norm,))
            q = self.wq_b(residual).unflatten(-1, (self.num_heads, self.head_dim))
            return chains.on_rows("queries", q, angles.cos, angles.sin, last=(self.norm_eps,)), residual

        def project_kv(self: Attention, x: Tensor, angles: RopeAngles) -> Tensor:
            return chains.on_rows("keys", self.wkv(x), angles.cos, angles.sin, first=(self.kv_norm,))

        def project_output(self: Attention, heads: Tensor, angles: RopeAngles) -> Tensor:
            heads = chains.on_rows("back", heads, angles.cos, angles.sin)
            grouped = heads.reshape(heads.shape[0], self.num_groups, -1).transpose(0, 1)
            weight = self.wo_a.weight.unflatten(0, (self.num_groups, -1)).transpose(1, 2)
            return self.wo_b(matmul(grouped, weight).transpose(0, 1).flatten(1))

        def gate(self: Gate, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
            count = x.shape[0]
            ids, weights = chains.call["route"](self, chains.pad(x), chains.pad(token_ids))
            return ids[:count], weights[:count]

        replaced = {(Block, "forward"): block, (Attention, "project_q"): project_q,
                    (Attention, "project_kv"): project_kv, (Attention, "project_output"): project_output,
                    (Gate, "forward"): gate}  # fmt: skip
        with ExitStack() as stack:
            for (owner, name), function in replaced.items():
                stack.enter_context(mock.patch.object(owner, name, function))
            yield


def chain_arguments(model: DeepseekV4, rows: int) -> dict[str, tuple]:
    """Arguments of every chain at this many rows, of a block with routing by score."""
    config, block = model.config, next(layer for layer in model.layers if not layer.ffn.gate.is_hash)

    def made(*shape: int) -> Tensor:
        return torch.randn(rows, *shape).to(model.dtype)

    streams, x = made(config.hc_mult, config.hidden_size), made(config.hidden_size)
    heads = (config.num_attention_heads, config.head_dim)
    angles = torch.rand(2, rows, config.qk_rope_head_dim // 2)
    inner = made(2 * config.moe_intermediate_size).chunk(2, -1)
    return {
        "read": (block.hc_attn, block.attn_norm, streams),
        "expand": (streams, x, block.hc_attn(streams)),
        "close": (model.hc_head, model.norm, streams),
        "norm": (block.attn.q_norm, made(config.q_lora_rank)),
        "queries": (made(*heads), *angles, config.rms_norm_eps),
        "keys": (block.attn.kv_norm, made(config.head_dim), *angles),
        "back": (made(*heads), *angles),
        "route": (block.ffn.gate, x, torch.zeros(rows, dtype=torch.int64)),
        "swiglu": (*inner, config.swiglu_limit),
    }


class Steps:
    """Decode steps of any rows of one store, in any way of computing them.

    A step of row r is at position CONTEXT − 37 · r mod 90, so rows are ragged and some complete entries. It writes
    what it reads at its own position, so steps may be repeated and ways may take turns over one store.

    Args:
        base: the model, whose native kernels fill the store.
    """

    def __init__(self, base: DeepseekV4) -> None:
        self.torch, self.native = base.with_kernels("torch"), base.with_kernels("native")
        self.setup = Setup(self.native, MOST_ROWS)
        self.setup.fill()

    def view(self, rows: range, context: int = CONTEXT) -> BatchView:
        """These rows' next tokens, with every index tensor made."""
        segments = []
        for row in rows:
            position = context - 37 * row % 90
            segments.append(Segment(row, position, self.setup.ids[row][position : position + 1]))
        view = self.setup.store.target_view(segments, self.torch.config.compress_ratios)
        _ = view.groups, view.completed, view.window_cells
        return view

    def attend(self, view: BatchView, layer: int) -> CachedAttention:
        """What a layer's attention sees."""
        return CachedAttention(self.setup.store.layers[layer], view, self.setup.tables)

    def eager(self, rows: range, chains: Chains | None = None) -> Tensor:
        """Logits [T, vocab] of the torch path; with chains, while they are in place."""
        view = self.view(rows)
        streams = self.torch.embed_streams(view.token_ids)
        if chains is not None:
            streams = chains.pad(streams)
        for layer_idx, layer in enumerate(self.torch.layers):
            streams = layer(streams, view.token_ids, self.attend(view, layer_idx))
        if chains is None:
            return self.torch.logits(streams)
        closed = chains.call["close"](self.torch.hc_head, self.torch.norm, streams)
        return self.torch.head(closed[: len(rows)])

    def kernels(self, rows: range) -> Tensor:
        """Logits [T, vocab] of the C++ kernels."""
        view = self.view(rows)
        return self.native.logits(self.native.native.target(self.setup.tables, self.setup.store, view))


def differ(left: Tensor, right: Tensor) -> int:
    """Rows [T, …] with a bit that is not the same."""
    whole = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return int((left.contiguous().view(whole) != right.contiguous().view(whole)).flatten(1).any(1).sum())


def kind(block: nn.Module) -> str:
    """What tells a block from others when it is compiled."""
    return f"ratio {block.attn.ratio}, {'hash' if block.ffn.gate.is_hash else 'score'} routing"


assert CONTEXT - 90 >= CHUNK, "rows' positions must lie in what was filled"
