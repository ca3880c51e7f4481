"""The cached forwards through the C++ kernels: one call each.

Holds pointers into the weights of a model, which must stay where they are; changing their values in place is fine.
Twins: model.forward and the modules that it runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from polytempo.cache.store import LayerState, RowStore
from polytempo.cache.view import BatchView
from polytempo.engine_config import AUTO, TORCH, TRITON
from polytempo.errors import ConfigError, InvariantError
from polytempo.kernels import ops
from polytempo.kernels.build import KernelError, load, load_or_note
from polytempo.kernels.structs import (
    PLAIN,
    Angles,
    CompressorWeights,
    Head,
    Layer,
    Matrix,
    Mtp,
    Pool,
    Site,
    State,
    Tokens,
)
from polytempo.kernels.threads import kernel_threads
from polytempo.model.compressor import Compressor
from polytempo.model.packed import Packed, PackedLinear
from polytempo.model.rope import RopeTables

MAX_STREAMS = 8
DTYPES = (torch.float32, torch.bfloat16)


def native_or_none(model: nn.Module, choice: str) -> NativeModel | None:
    """The kernels of a model, if they are wanted and can serve it.

    Args:
        model: a DeepseekV4.
        choice: "auto", "native", "triton" or "torch".

    Returns:
        None means the torch path, which is Triton's too.

    Raises:
        ConfigError: "native", and there are none or they do not fit the model.
    """
    if choice in (TORCH, TRITON):
        return None
    reason = _misfit(model)
    if choice == AUTO:
        library = None if reason else load_or_note()
        return None if library is None else NativeModel(library, model)
    try:
        if reason:
            raise KernelError(reason)
        return NativeModel(load(), model)
    except KernelError as error:
        raise ConfigError(f"option 'kernels' is 'native', but {error}; use 'auto' or 'torch'") from None


def _misfit(model: nn.Module) -> str | None:
    """Why the kernels cannot serve a model."""
    if model.device.type != "cpu":
        return f"the model is on {model.device}; the kernels run on the CPU"
    if model.embed.weight.dtype != model.dtype:
        return f"the model was made in {model.dtype}, and its weights are {model.embed.weight.dtype} now"
    if model.dtype not in DTYPES:
        return f"the model is {model.dtype}"
    if model.config.hc_mult > MAX_STREAMS:
        return f"the model has {model.config.hc_mult} streams; the kernels take {MAX_STREAMS}"
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if not weight.is_contiguous():
            return f"weight {name!r} is not contiguous"
    return None


class NativeModel:
    """Pointers to a model's weights, and the calls that use them.

    Holds parts of the model, not the model itself, so that no cycle keeps the weights alive. A weight that is replaced
    by another Parameter is not seen, but its memory stays: pointers never dangle.

    Args:
        library: from `kernels.build.load`.
        model: a DeepseekV4 on the CPU, all weights contiguous.
    """

    def __init__(self, library: ctypes.CDLL, model: nn.Module) -> None:
        config = model.config
        self.library, self.dtype, self.vocab_size = library, model.dtype, config.vocab_size
        self.streams_shape = config.hc_mult, config.hidden_size
        self.embed = model.embed
        self.memory = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
        self.first_weight = model.embed.weight.data_ptr()
        self.layers = (Layer * len(model.layers))(*(_layer(model, block) for block in model.layers))
        self.mtp = (Layer * len(model.mtp))(*(_layer(model, block) for block in model.mtp))
        self.mtp_inputs = [_mtp_inputs(model, block) for block in model.mtp]
        self.head = _head(model, model.hc_head, model.norm)
        self.mtp_heads = [_head(model, block.hc_head, block.norm) for block in model.mtp]
        self._bound: WeakKeyDictionary[LayerState, _Bound] = WeakKeyDictionary()

    @property
    def is_current(self) -> bool:
        """Whether the weights are where they were (`Module.to` moves them)."""
        return self.embed.weight.data_ptr() == self.first_weight

    def __reduce__(self) -> tuple:
        """Copies and pickles of a model get None, and build pointers of their own."""
        return type(None), ()

    def target(
        self, tables: RopeTables, store: RowStore, view: BatchView, keeps_streams: bool = False
    ) -> Tensor:
        """As `forward.target_forward`."""
        out = self.embed.weight.new_empty(view.num_tokens, *self.streams_shape)
        kept = store.mtp_streams
        bound = self._bind(self.layers, store.layers, tables, view)
        unknown = self.library.pt_target(
            self.layers, bound.states, bound.angles, len(self.layers), ctypes.byref(self._tokens(view)),
            self.first_weight, self.vocab_size, out.data_ptr(), kept.data_ptr() if keeps_streams else None,
            kept.shape[1],
        )  # fmt: skip
        self._check_known(unknown, view)
        return out

    def mtp_block(
        self, tables: RopeTables, store: RowStore, view: BatchView, streams: Tensor, num_queries: int,
        token_idx: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """As `forward.mtp_write` for all but the last `num_queries` pairs, and as `forward.mtp_forward` for these.

        Args:
            tables: RoPE over the store's positions.
            store: state of all rows.
            view: positions are the pairs' p; token_ids are the tokens of p + 1.
            streams: [S, hc, D].
            num_queries: Q.
            token_idx: which of the streams is each pair's; None: S pairs in the same order.

        Returns:
            [Q, hc, D].
        """
        streams = streams.contiguous()
        ops.check_operand("streams", streams, self.dtype)
        source = None if token_idx is None else torch.tensor(token_idx)
        used = range(len(streams)) if token_idx is None else token_idx
        if len(used) != view.num_tokens or min(used, default=0) < 0 or max(used, default=0) >= len(streams):
            raise InvariantError(f"{len(streams)} streams, of which {list(used)}, for {view.num_tokens} pairs")
        if not 0 <= num_queries <= view.num_tokens:
            raise InvariantError(f"{num_queries} queries of {view.num_tokens} pairs")
        out = streams.new_empty(num_queries, *self.streams_shape)
        bound = self._bind(self.mtp, store.mtp, tables, view)
        unknown = self.library.pt_mtp(
            self.mtp, ctypes.byref(self.mtp_inputs[0]), bound.states, bound.angles, ctypes.byref(self._tokens(view)),
            num_queries, self.vocab_size, streams.data_ptr(), None if source is None else source.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        self._check_known(unknown, view)
        return out

    def logits(self, streams: Tensor, is_mtp: bool = False) -> Tensor:
        """Logits [T, vocab] of streams [T, hc, D], through the target's or the MTP block's own head."""
        streams = streams.contiguous()
        ops.check_operand("streams", streams, self.dtype)
        out = streams.new_empty(streams.shape[0], self.vocab_size)
        tokens = Tokens(count=streams.shape[0], is_bf16=self._is_bf16, threads=kernel_threads())
        head = self.mtp_heads[0] if is_mtp else self.head
        self.library.pt_logits(self.layers, ctypes.byref(head), ctypes.byref(tokens), streams.data_ptr(),
                               out.data_ptr())  # fmt: skip
        return out

    def greedy(self, logits: Tensor) -> Tensor:
        """As `sampling.greedy`."""
        return ops.greedy(self.library, logits)

    def uniform(self, seeds: Tensor, choices: Tensor, positions: Tensor, num_groups: int) -> Tensor:
        """As `noise.uniform`."""
        return ops.uniform(self.library, seeds, choices, positions, num_groups)

    @property
    def _is_bf16(self) -> bool:
        return self.dtype == torch.bfloat16

    def _tokens(self, view: BatchView) -> Tokens:
        addresses = _pointers(view.token_ids, view.slots, view.positions)
        return Tokens(view.num_tokens, *addresses, None, None, self._is_bf16, kernel_threads())

    def _check_known(self, unknown: int, view: BatchView) -> None:
        if unknown >= 0:
            raise InvariantError(
                f"token {int(view.token_ids[unknown])} at position {int(view.positions[unknown])} of slot "
                f"{int(view.slots[unknown])} is not in the vocabulary of {self.vocab_size}"
            )

    def _bind(
        self, layers: ctypes.Array, states: Sequence[LayerState], tables: RopeTables, view: BatchView
    ) -> _Bound:
        """Where the layers' state lies: found anew only when a pool has moved, but for the view's block tables."""
        entries = [pool.entries for state in states for pool in state.pooled]
        bound = self._bound.get(states[0])
        if bound is None or bound.tables is not tables or not all(map(is_, (x() for x in bound.entries), entries)):
            found = [tables.for_ratio(layer.ratio) for layer in layers]
            bound = _Bound(
                tables, list(map(ref, entries)), (State * len(layers))(*map(_addresses, states)),
                (Angles * len(layers))(*(Angles(*_pointers(table.cos, table.sin)) for table in found)),
            )  # fmt: skip
            self._bound[states[0]] = bound
        for ratio, table in view.block_tables.items():
            address, width = table.data_ptr(), table.shape[1]
            for layer, state in zip(layers, bound.states, strict=True):
                if layer.ratio == ratio:
                    state.pool.table = state.index_pool.table = address
                    state.pool.table_width = state.index_pool.table_width = width
        return bound


@dataclass(frozen=True)
class _Bound:
    """Addresses of the layers' state and rotary tables, and what must stay where it is for them to hold.

    Pools are not kept alive: an idle engine gives their memory back.
    """

    tables: RopeTables
    entries: list[ref[Tensor]]
    states: ctypes.Array
    angles: ctypes.Array


def linear_matrix(linear: nn.Module) -> Matrix:
    """The weight of a Linear or PackedLinear as the kernels take it; the caller keeps the module alive."""
    return _matrix(linear.stored if isinstance(linear, PackedLinear) else linear.weight)


def _matrix(weight: Tensor | Packed) -> Matrix:
    if isinstance(weight, Packed):
        return Matrix(*_pointers(weight.codes, weight.scales), weight.kind)
    return Matrix(weight.data_ptr(), None, PLAIN)


def _pointers(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _layer(model: nn.Module, block: nn.Module) -> Layer:
    """Sizes and weights of one block; the caller keeps the block alive."""
    config, attn, ffn = model.config, block.attn, block.ffn
    layer = Layer(
        hidden=config.hidden_size, hc=config.hc_mult, sinkhorn_iterations=config.hc_sinkhorn_iters,
        heads=attn.num_heads, head_dim=attn.head_dim, rope_pairs=config.qk_rope_head_dim // 2,
        q_rank=config.q_lora_rank, groups=attn.num_groups, o_rank=config.o_lora_rank, ratio=attn.ratio,
        window=config.sliding_window, experts=config.n_routed_experts, top_k=ffn.gate.top_k,
        inner=config.moe_intermediate_size, shared_inner=config.moe_intermediate_size * config.n_shared_experts,
        norm_eps=config.rms_norm_eps, hc_eps=config.hc_eps, attn_scale=attn.scale,
        route_scale=ffn.gate.route_scale, swiglu_limit=ffn.experts.limit,
        attn_site=_site(block.hc_attn, block.attn_norm), ffn_site=_site(block.hc_ffn, block.ffn_norm),
    )  # fmt: skip
    for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"):
        setattr(layer, name, linear_matrix(getattr(attn, name)))
    layer.q_norm, layer.kv_norm, layer.sink = _pointers(attn.q_norm.weight, attn.kv_norm.weight, attn.attn_sink)
    if attn.ratio:
        layer.compressor = _compressor(attn.compressor)
    if hasattr(attn, "indexer"):
        indexer = attn.indexer
        layer.index_heads, layer.index_dim, layer.index_top_k = indexer.num_heads, indexer.head_dim, indexer.top_k
        layer.index_scale = indexer.scale
        layer.index_compressor = _compressor(indexer.compressor)
        layer.index_wq_b, layer.index_weights = linear_matrix(indexer.wq_b), indexer.weights_proj.weight.data_ptr()
    gate, experts, shared = ffn.gate, ffn.experts, ffn.shared_experts
    layer.gate_weight, layer.w13, layer.w2 = gate.weight.data_ptr(), _matrix(experts.w13), _matrix(experts.w2)
    if gate.is_hash:
        layer.gate_table = gate.tid2eid.data_ptr()
    else:
        layer.gate_bias = gate.bias.data_ptr()
    for name in ("w1", "w2", "w3"):
        setattr(layer, f"shared_{name}", linear_matrix(getattr(shared, name)))
    return layer


def _mtp_inputs(model: nn.Module, block: nn.Module) -> Mtp:
    """What an MTP block makes its input of; the caller keeps model and block alive."""
    projections = linear_matrix(block.h_proj), linear_matrix(block.e_proj)
    return Mtp(*_pointers(block.hnorm.weight, block.enorm.weight), *projections, model.embed.weight.data_ptr())


def _head(model: nn.Module, connection: nn.Module, norm: nn.Module) -> Head:
    return Head(_site(connection, norm), model.head.weight.data_ptr(), model.config.vocab_size)


def _site(connection: nn.Module, norm: nn.Module) -> Site:
    return Site(*_pointers(connection.fn, connection.base, connection.scale, norm.weight))


def _compressor(compressor: Compressor) -> CompressorWeights:
    return CompressorWeights(
        *_pointers(compressor.wkv.weight, compressor.wgate.weight, compressor.ape, compressor.norm.weight)
    )


def _addresses(state: LayerState) -> State:
    """All of a layer's state but the block table."""
    found = State(window=state.window.data_ptr(), window_cells=state.window.shape[1])
    for name, pooled in (("pool", state.compressed), ("index_pool", state.index)):
        if pooled is not None:
            own = Pool(*_pointers(pooled.kv, pooled.gate, pooled.entries), cells=pooled.kv.shape[1])
            setattr(found, name, own)
    return found
