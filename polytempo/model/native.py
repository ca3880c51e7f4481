"""The cached forwards through the C++ kernels: one call per block.

Holds pointers into the weights of a model, which must stay where they are; changing their values in place is fine.
Twins: model.forward and the modules that it runs.
"""

from __future__ import annotations

import ctypes
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from polytempo.cache.store import LayerState, RowStore
from polytempo.cache.view import BatchView
from polytempo.errors import ConfigError
from polytempo.kernels import ops
from polytempo.kernels.build import KernelError, load, load_or_note
from polytempo.kernels.structs import PLAIN, CompressorWeights, Layer, Matrix, Mtp, Pool, Site, State, Tokens
from polytempo.kernels.threads import kernel_threads
from polytempo.model.compressor import Compressor
from polytempo.model.packed import Packed, PackedLinear
from polytempo.model.rope import RopeAngles, RopeTables

MAX_STREAMS = 8
DTYPES = (torch.float32, torch.bfloat16)


def native_or_none(model: nn.Module, choice: str) -> NativeModel | None:
    """The kernels of a model, if they are wanted and can serve it.

    Args:
        model: a DeepseekV4.
        choice: "auto", "native" or "torch".

    Returns:
        None means the torch path.

    Raises:
        ConfigError: "native", and there are none or they do not fit the model.
    """
    if choice == "torch":
        return None
    reason = _misfit(model)
    if choice == "auto":
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
        self.library, self.dtype, self.num_streams = library, model.dtype, model.config.hc_mult
        self.embed, self.vocab_projection = model.embed, model.head
        self.memory = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
        self.first_weight = model.embed.weight.data_ptr()
        self.layers = [_layer(model, block) for block in model.layers]
        self.mtp = [_layer(model, block) for block in model.mtp]
        self.mtp_inputs = [_mtp_inputs(model, block) for block in model.mtp]
        self._states: WeakKeyDictionary[LayerState, tuple[State, list[Tensor]]] = WeakKeyDictionary()
        self.head = Site(*_pointers(model.hc_head.fn, model.hc_head.base, model.hc_head.scale, model.norm.weight))
        self.mtp_heads = [
            Site(*_pointers(b.hc_head.fn, b.hc_head.base, b.hc_head.scale, b.norm.weight)) for b in model.mtp
        ]

    @property
    def is_current(self) -> bool:
        """Whether the weights are where they were (`Module.to` moves them)."""
        return self.embed.weight.data_ptr() == self.first_weight

    def __reduce__(self) -> tuple:
        """Copies and pickles of a model get None, and build pointers of their own."""
        return type(None), ()

    def target(self, tables: RopeTables, store: RowStore, view: BatchView) -> Tensor:
        """As `forward.target_forward`."""
        streams = self.embed(view.token_ids).unsqueeze(1).repeat(1, self.num_streams, 1)
        spare = torch.empty_like(streams)
        tokens = {ratio: self._tokens(view, tables.for_ratio(ratio)) for ratio in {x.ratio for x in self.layers}}
        for layer, state in zip(self.layers, store.layers, strict=True):
            arguments = ctypes.byref(layer), ctypes.byref(self._state(state, view)), ctypes.byref(tokens[layer.ratio])
            self.library.pt_block(*arguments, streams.data_ptr(), spare.data_ptr())
            streams, spare = spare, streams
        return streams

    def mtp_block(self, tables: RopeTables, store: RowStore, view: BatchView, streams: Tensor) -> Tensor:
        """As `forward.mtp_forward`."""
        streams = streams.contiguous()
        ops.check_operand("streams", streams, self.dtype)
        out = torch.empty_like(streams)
        self.library.pt_mtp_block(*self._mtp_arguments(tables, store, view), streams.data_ptr(), out.data_ptr())
        return out

    def mtp_keys(self, tables: RopeTables, store: RowStore, view: BatchView, streams: Tensor) -> None:
        """As `forward.mtp_write`."""
        streams = streams.contiguous()
        ops.check_operand("streams", streams, self.dtype)
        self.library.pt_mtp_keys(*self._mtp_arguments(tables, store, view), streams.data_ptr())

    def logits(self, streams: Tensor, is_mtp: bool = False) -> Tensor:
        """Logits [T, vocab] of streams [T, hc, D], through the target's or the MTP block's own head."""
        site = self.mtp_heads[0] if is_mtp else self.head
        streams = streams.contiguous()
        ops.check_operand("streams", streams, self.dtype)
        x = streams.new_empty(streams.shape[0], streams.shape[2])
        tokens = Tokens(count=streams.shape[0], is_bf16=self._is_bf16, threads=kernel_threads())
        self.library.pt_head(ctypes.byref(self.layers[0]), ctypes.byref(site), ctypes.byref(tokens),
                             streams.data_ptr(), x.data_ptr())  # fmt: skip
        return ops.linear(self.library, x, self.vocab_projection.weight)

    @property
    def _is_bf16(self) -> bool:
        return self.dtype == torch.bfloat16

    def _tokens(self, view: BatchView, table: RopeAngles) -> Tokens:
        return Tokens(
            view.num_tokens, *_pointers(view.token_ids, view.slots, view.positions, table.cos, table.sin),
            self._is_bf16, kernel_threads(),
        )  # fmt: skip

    def _mtp_arguments(self, tables: RopeTables, store: RowStore, view: BatchView) -> tuple:
        tokens, state = self._tokens(view, tables.plain), self._state(store.mtp[0], view)
        return ctypes.byref(self.mtp[0]), ctypes.byref(self.mtp_inputs[0]), ctypes.byref(state), ctypes.byref(tokens)

    def _state(self, state: LayerState, view: BatchView) -> State:
        """Where a layer's state lies: found anew only when a pool has moved, but for the view's block table."""
        known, entries = self._states.get(state, (None, None))
        if known is None or any(pool.entries is not old for pool, old in zip(state.pooled, entries, strict=True)):
            known, entries = _addresses(state), [pool.entries for pool in state.pooled]
            self._states[state] = known, entries
        if state.compressed is not None:
            table = view.block_tables[state.shape.ratio]
            known.pool.table = known.index_pool.table = table.data_ptr()
            known.pool.table_width = known.index_pool.table_width = table.shape[1]
        return known


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
