"""Tiny random models and a bare harness around the cached forward, for tests of every layer kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from polytempo.cache.layout import Segment, StateShape, check_segments
from polytempo.cache.store import PooledState, RowStore
from polytempo.cache.view import BatchView
from polytempo.config import ModelConfig, RopeConfig
from polytempo.engine_config import EngineConfig
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.forward import mtp_forward, target_forward
from polytempo.model.rope import RopeTables

TINY = ModelConfig(
    vocab_size=97,
    hidden_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    compress_ratios=(0, 4, 128, 4),
    rope=RopeConfig(theta=10000.0),
    compress_rope=RopeConfig(theta=160000.0, factor=16.0, original_max_position_embeddings=64),
    num_hash_layers=1,
    index_n_heads=8,
    index_head_dim=16,
    index_topk=8,
    sliding_window=16,
    hc_mult=3,
    hc_sinkhorn_iters=4,
    max_position_embeddings=2048,
    bos_token_id=0,
    eos_token_ids=(1,),
    dtype="float32",
)
ENGINE = EngineConfig(max_rows=8, max_model_len=768, max_chunk=704, max_step_tokens=4096)


def random_model(config: ModelConfig = TINY, seed: int = 0, dtype: torch.dtype = torch.float32) -> DeepseekV4:
    """A model whose every weight matters: nothing is left at zero or one."""
    generator = torch.Generator().manual_seed(seed)
    model = DeepseekV4(config, dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.2 * noise)
            elif "hc_" in name and weight.dim() == 1:
                # Weak mixing makes all streams alike, and hides which stream went where.
                weight.copy_(1 + 0.3 * noise if name.endswith("scale") else noise)
            elif weight.dim() == 1:
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(noise * (1.6 / math.sqrt(weight.shape[-1]) if "embed" not in name else 1.0))
        for layer in model.layers:
            if layer.ffn.gate.is_hash:
                table = layer.ffn.gate.tid2eid
                for token_id in range(table.shape[0]):
                    table[token_id] = torch.randperm(config.n_routed_experts, generator=generator)[: table.shape[1]]
    return model.requires_grad_(False)


def random_ids(length: int, seed: int, vocab_size: int = TINY.vocab_size) -> list[int]:
    """A token stream of its own for each seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(2, vocab_size, (length,), generator=generator).tolist()


class Harness:
    """Model, state and tables; forwards any segments and returns streams per segment."""

    def __init__(self, model: DeepseekV4, engine: EngineConfig = ENGINE) -> None:
        self.model, self.engine, self.config = model, engine, model.config
        self.tables = RopeTables.build(model.config, engine.max_model_len, model.device)
        shape = StateShape.build(model.config, engine)
        self.store = RowStore.allocate(shape, engine.max_rows, model.dtype, model.device)
        # All blocks in order, so that tests can look at entries slot by slot.
        for slot in range(engine.max_rows):
            self.store.pool.reserve(slot, engine.max_model_len)
        self.store.fit()

    def view(self, segments: Sequence[Segment]) -> BatchView:
        """Lay out a forward."""
        check_segments(segments, self.engine)
        return self.store.target_view(segments, self.config.compress_ratios)

    def streams(self, *segments: Segment) -> list[Tensor]:
        """One forward; last-layer streams [n, hc, D] of each segment."""
        streams = target_forward(self.model, self.tables, self.store, self.view(segments))
        return list(streams.split([len(segment.token_ids) for segment in segments]))

    def logits(self, *segments: Segment) -> list[Tensor]:
        """One forward; logits [n, vocab] of each segment."""
        streams = self.streams(*segments)
        return list(self.model.logits(torch.cat(streams)).split([len(s) for s in streams]))

    def mtp(self, streams: Tensor, *segments: Segment) -> Tensor:
        """One MTP forward; its output streams."""
        check_segments(segments, self.engine)
        return mtp_forward(self.model, self.tables, self.store, self.store.mtp_view(segments), streams)

    def prefill(self, ids: Sequence[int], sizes: Sequence[int], slot: int = 0, start: int = 0) -> Tensor:
        """Feed ids in chunks of these sizes (the last repeats); logits [len(ids), vocab]."""
        rows, place, chunk_idx = [], 0, 0
        while place < len(ids):
            size = sizes[min(chunk_idx, len(sizes) - 1)]
            rows += self.logits(Segment(slot, start + place, ids[place : place + size]))
            place, chunk_idx = place + size, chunk_idx + 1
        return torch.cat(rows)


TIGHT_ENGINE = EngineConfig(max_rows=8, max_model_len=768, max_chunk=8, max_step_tokens=64)
"""Rings with no cell to spare (23 window cells in TINY): they wrap many times, and a rewind of 8 just fits."""


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, as a share of the range of `theirs`."""
    ours, theirs = ours.float(), theirs.float()
    return float((ours - theirs).abs().max() / (theirs.max() - theirs.min()))


def choice_margin_is_clear(model: DeepseekV4, ids: Sequence[int]) -> bool:
    """Whether no query's choice of entries hangs on a rounding error (ties of the indexer are excluded)."""
    from polytempo.model import cached_attention

    margins = []
    original = cached_attention.choose_entries

    def spy(scores, num_visible, top_k):
        chooses = num_visible > top_k
        if chooses.any():
            hidden = torch.arange(scores.shape[-1], device=scores.device) >= num_visible.unsqueeze(-1)
            ranked = scores.masked_fill(hidden, -torch.inf)[chooses].sort(dim=-1, descending=True).values
            margins.append(float((ranked[:, top_k - 1] - ranked[:, top_k]).min()))
        return original(scores, num_visible, top_k)

    cached_attention.choose_entries = spy
    try:
        Harness(model.with_kernels("torch")).prefill(ids, [len(ids)])
    finally:
        cached_attention.choose_entries = original
    return not margins or min(margins) > 2e-6


def ids_with_clear_choices(model: DeepseekV4, length: int) -> list[int]:
    """The first random stream whose choices of entries have a margin."""
    for seed in range(40):
        ids = random_ids(length, seed=seed)
        if choice_margin_is_clear(model, ids):
            return ids
    raise AssertionError("every candidate stream has an indexer tie")


def alone(model: DeepseekV4, ids: Sequence[int], prompt_len: int) -> Tensor:
    """Logits [len(ids), vocab] of one row in a state of its own: the prompt in one piece, then single tokens."""
    harness = Harness(model, replace(ENGINE, max_rows=1, max_step_tokens=704))
    sizes = [prompt_len, 1] if prompt_len else [1]
    return harness.prefill(ids, sizes)


def entries_by_slot(store: RowStore, pooled: PooledState, ratio: int, writable: bool = False) -> Tensor:
    """A compressor's entries, [slots, max_entries, head_dim]: a view if all blocks lie in order, else a copy."""
    table = store.pool.ratios[ratio].table
    in_order = (table.reshape(-1) == np.arange(1, table.size + 1)).all() and pooled.entries.shape[0] == table.size + 1
    assert in_order or not writable, "the blocks are out of order: writing to a copy would do nothing"
    if in_order:
        return pooled.entries[1:].view(table.shape[0], -1, pooled.entries.shape[2])
    return pooled.entries[torch.from_numpy(table)].flatten(1, 2)


def slot_tensors(store: RowStore, writable: bool = False) -> list[Tensor]:
    """Every tensor of the state, slot first, [slots, cells or entries, channels]."""
    tensors = []
    for layer in (*store.layers, *store.mtp):
        tensors.append(layer.window)
        for pooled in layer.pooled:
            tensors += [pooled.kv, pooled.gate, entries_by_slot(store, pooled, layer.shape.ratio, writable)]
    return tensors


def visible_cells(config: ModelConfig, store: RowStore, lengths: dict[int, int]) -> list[Tensor]:
    """Which cells of `slot_tensors(store)` the rows' next tokens may read, given slot -> tokens forwarded so far.

    Written from the rules, apart from the package: the window before the next position, the inputs of the spans
    that are still open (and of the one before, at ratio 4), and the row's own finished entries.
    """
    kept = [torch.zeros(tensor.shape[:2], dtype=torch.bool) for tensor in slot_tensors(store)]
    for slot, length in lengths.items():
        masks = iter(mask[slot] for mask in kept)

        def keep_positions(mask: Tensor, first: int, length: int = length) -> None:
            for position in range(max(first, 0), length):
                mask[position % len(mask)] = True

        for ratio in (*config.compress_ratios, *config.mtp_compress_ratios):
            keep_positions(next(masks), length - config.sliding_window + 1)
            for _ in range({0: 0, 4: 2, 128: 1}[ratio]):
                first = (length // ratio - (ratio == 4)) * ratio
                keep_positions(next(masks), first)
                keep_positions(next(masks), first)
                next(masks)[: length // ratio] = True
    return kept


def poison(store: RowStore, kept: Sequence[Tensor], value: float) -> None:
    """Put `value`, with random signs, into every cell that is not in `kept`."""
    generator = torch.Generator().manual_seed(7)
    for tensor, mask in zip(slot_tensors(store, writable=True), kept, strict=True):
        signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        poisoned = (signs * value).to(tensor.dtype)
        tensor.copy_(torch.where(mask.unsqueeze(-1), tensor, poisoned))


def transformers_model(model: DeepseekV4):
    """transformers' DeepseekV4ForCausalLM with these weights, float32, eager attention."""
    transformers = pytest.importorskip("transformers", reason="the release with DeepSeek-V4 needs Python 3.11")
    config = model.config
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    compress = config.compress_rope
    hf_config = transformers.DeepseekV4Config(
        **{name: getattr(config, name) for name in _SAME_NAME},
        layer_types=[kinds[ratio] for ratio in config.compress_ratios],
        mlp_layer_types=["hash_moe" if config.is_hash_layer(i) else "moe" for i in range(config.num_hidden_layers)],
        partial_rotary_factor=config.qk_rope_head_dim / config.head_dim,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": config.rope.theta,
                     "partial_rotary_factor": config.qk_rope_head_dim / config.head_dim},
            "compress": {"rope_type": "yarn", "rope_theta": compress.theta, "factor": compress.factor,
                         "original_max_position_embeddings": compress.original_max_position_embeddings,
                         "beta_fast": compress.beta_fast, "beta_slow": compress.beta_slow, "attention_factor": 1.0,
                         "partial_rotary_factor": config.qk_rope_head_dim / config.head_dim},
        },
        num_key_value_heads=1,
    )  # fmt: skip
    hf_config._attn_implementation = "eager"
    reference = transformers.DeepseekV4ForCausalLM(hf_config).eval()
    state = {}
    for key, value in model.state_dict().items():
        if not key.startswith("mtp."):
            state[_transformers_key(key)] = value
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert all("inv_freq" in key for key in missing), missing
    return reference


_SAME_NAME = (
    "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "q_lora_rank", "o_groups", "o_lora_rank", "n_routed_experts", "num_experts_per_tok", "n_shared_experts",
    "index_n_heads", "index_head_dim", "index_topk", "sliding_window", "hc_mult", "hc_sinkhorn_iters", "hc_eps",
    "rms_norm_eps", "routed_scaling_factor", "swiglu_limit", "scoring_func", "max_position_embeddings",
)  # fmt: skip

_RENAMES = (
    ("embed.weight", "model.embed_tokens.weight"),
    ("head.weight", "lm_head.weight"),
    ("norm.weight", "model.norm.weight"),
    ("hc_head.fn", "model.hc_head.hc_fn"),
    ("hc_head.base", "model.hc_head.hc_base"),
    ("hc_head.scale", "model.hc_head.hc_scale"),
)
_PARTS = (
    (".attn.indexer.compressor.norm.", ".self_attn.compressor.indexer.kv_norm."),
    (".attn.indexer.compressor.", ".self_attn.compressor.indexer."),
    (".attn.indexer.weights_proj.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (".attn.indexer.wq_b.", ".self_attn.compressor.indexer.q_b_proj."),
    (".attn.compressor.norm.", ".self_attn.compressor.kv_norm."),
    (".attn.", ".self_attn."), (".ffn.", ".mlp."), (".hc_attn.", ".attn_hc."), (".hc_ffn.", ".ffn_hc."),
    (".attn_norm.", ".input_layernorm."), (".ffn_norm.", ".post_attention_layernorm."), (".wkv.", ".kv_proj."),
    (".wgate.", ".gate_proj."), (".ape", ".position_bias"), (".wq_a.", ".q_a_proj."), (".wq_b.", ".q_b_proj."),
    (".q_norm.", ".q_a_norm."), (".wo_a.", ".o_a_proj."), (".wo_b.", ".o_b_proj."), (".attn_sink", ".sinks"),
    (".gate.bias", ".gate.e_score_correction_bias"), (".experts.w13", ".experts.gate_up_proj"),
    (".experts.w2", ".experts.down_proj"), (".shared_experts.w1.", ".shared_experts.gate_proj."),
    (".shared_experts.w2.", ".shared_experts.down_proj."), (".shared_experts.w3.", ".shared_experts.up_proj."),
)  # fmt: skip


def _transformers_key(key: str) -> str:
    """The live transformers name of one of our weights, written out apart from the package's own mapping."""
    for ours, theirs in _RENAMES:
        if key == ours:
            return theirs
    for ours, theirs in _PARTS:
        key = key.replace(ours, theirs)
    return f"model.{key}"


def with_ratios(*ratios: int, **changes) -> ModelConfig:
    """TINY with other layer kinds."""
    return replace(TINY, num_hidden_layers=len(ratios), compress_ratios=ratios, **changes)
