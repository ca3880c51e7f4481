"""Which tensors a checkpoint of a given config holds, under which names, and where each goes in the model.

Three spellings of the names are in use: the official one, the one that transformers' `save_pretrained` writes
("huggingface"), and that of a live transformers model's `state_dict()`. All are mapped to the official one
first. Knows nothing of files, and of torch only the dtypes.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from polytempo.config import ModelConfig

FORMS = ("official", "huggingface")


class Storage(enum.Enum):
    """How the official checkpoint stores a tensor, and what it is in memory."""

    FP8 = "e4m3 with a scale; model dtype in memory"
    EXPERT = "fp4 or e4m3 with a scale; model dtype in memory"
    BF16 = "bfloat16; model dtype in memory"
    BF16_WIDENED = "bfloat16; float32 in memory"
    FP32 = "float32; float32 in memory"
    INT64 = "int64; int64 in memory"

    def memory_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Dtype of the tensor in a model of `model_dtype`."""
        if self is Storage.INT64:
            return torch.int64
        return torch.float32 if self in (Storage.FP32, Storage.BF16_WIDENED) else model_dtype

    @property
    def is_quantised(self) -> bool:
        """Whether the quantised official form has codes and a scale for it."""
        return self in (Storage.FP8, Storage.EXPERT)


@dataclass(frozen=True)
class WeightSpec:
    """One tensor of a checkpoint.

    Attributes:
        name: official name.
        key: name in `DeepseekV4.state_dict()`.
        shape: unquantised shape.
        storage: see `Storage`.
        where: index of its place in the state-dict tensor; empty means all of it.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    storage: Storage
    where: tuple[int | slice, ...] = ()

    @property
    def scale_name(self) -> str:
        """Official name of the scale, if the tensor is quantised."""
        return self.name.removesuffix(".weight") + ".scale"

    @property
    def is_mtp(self) -> bool:
        """Whether the tensor belongs to an MTP block."""
        return self.name.startswith("mtp.")


def expected_weights(config: ModelConfig, fused_experts: frozenset[str] = frozenset()) -> list[WeightSpec]:
    """Every tensor that a checkpoint of this config holds, scales aside.

    Args:
        config: the model's shape.
        fused_experts: prefixes (such as "layers.3.") of the blocks whose experts come as two stacked tensors,
            as in a live transformers model, instead of three tensors per expert.

    Returns:
        Specs in model order; together they fill the whole state dict.
    """
    width, vocab = config.hidden_size, config.vocab_size
    specs = [_spec("embed.weight", (vocab, width), Storage.BF16)]
    for layer_idx, ratio in enumerate(config.compress_ratios):
        prefix = f"layers.{layer_idx}."
        is_fused = prefix in fused_experts
        specs += _block(config, prefix, ratio, config.is_hash_layer(layer_idx), is_fused)
    specs += _hyper("hc_head", config.hc_mult, 1, config)
    specs.append(_spec("norm.weight", (width,), Storage.BF16_WIDENED))
    specs.append(_spec("head.weight", (vocab, width), Storage.BF16))
    for block_idx, ratio in enumerate(config.mtp_compress_ratios):
        specs += _mtp_block(config, f"mtp.{block_idx}.", ratio, f"mtp.{block_idx}." in fused_experts)
    return specs


def _spec(name: str, shape: tuple[int, ...], storage: Storage) -> WeightSpec:
    return WeightSpec(name, name, shape, storage)


def _mtp_block(config: ModelConfig, prefix: str, ratio: int, is_fused: bool) -> Iterator[WeightSpec]:
    yield from _block(config, prefix, ratio, False, is_fused)
    width = config.hidden_size
    for leaf in ("e_proj", "h_proj"):
        yield _spec(f"{prefix}{leaf}.weight", (width, width), Storage.FP8)
    for leaf in ("enorm", "hnorm", "norm"):
        yield _spec(f"{prefix}{leaf}.weight", (width,), Storage.BF16_WIDENED)
    yield from _hyper(f"{prefix}hc_head", config.hc_mult, 1, config)


def _block(config: ModelConfig, prefix: str, ratio: int, is_hash: bool, is_fused: bool) -> Iterator[WeightSpec]:
    for leaf in ("attn_norm", "ffn_norm"):
        yield _spec(f"{prefix}{leaf}.weight", (config.hidden_size,), Storage.BF16_WIDENED)
    for leaf in ("hc_attn", "hc_ffn"):
        yield from _hyper(prefix + leaf, (2 + config.hc_mult) * config.hc_mult, 3, config)
    yield from _attention(config, prefix + "attn.", ratio)
    yield from _ffn(config, prefix + "ffn.", is_hash, is_fused)


def _hyper(name: str, num_rows: int, num_scales: int, config: ModelConfig) -> Iterator[WeightSpec]:
    shapes = {
        "fn": (num_rows, config.hc_mult * config.hidden_size),
        "base": (num_rows,),
        "scale": (num_scales,),
    }
    for leaf, shape in shapes.items():
        yield WeightSpec(f"{name}_{leaf}", f"{name}.{leaf}", shape, Storage.FP32)


def _attention(config: ModelConfig, prefix: str, ratio: int) -> Iterator[WeightSpec]:
    width, rank, head_dim = config.hidden_size, config.q_lora_rank, config.head_dim
    all_heads = config.num_attention_heads * head_dim
    low_rank = config.o_groups * config.o_lora_rank
    matrices = {
        "wq_a": (rank, width),
        "wq_b": (all_heads, rank),
        "wkv": (head_dim, width),
        "wo_a": (low_rank, all_heads // config.o_groups),
        "wo_b": (width, low_rank),
    }
    for leaf, shape in matrices.items():
        yield _spec(f"{prefix}{leaf}.weight", shape, Storage.FP8)
    yield _spec(f"{prefix}q_norm.weight", (rank,), Storage.BF16_WIDENED)
    yield _spec(f"{prefix}kv_norm.weight", (head_dim,), Storage.BF16_WIDENED)
    yield _spec(f"{prefix}attn_sink", (config.num_attention_heads,), Storage.FP32)
    if ratio:
        yield from _compressor(config, f"{prefix}compressor.", ratio, head_dim)
    if ratio == 4:
        prefix += "indexer."
        index_heads = config.index_n_heads * config.index_head_dim
        yield _spec(f"{prefix}wq_b.weight", (index_heads, rank), Storage.FP8)
        yield _spec(f"{prefix}weights_proj.weight", (config.index_n_heads, width), Storage.BF16)
        yield from _compressor(config, f"{prefix}compressor.", ratio, config.index_head_dim)


def _compressor(config: ModelConfig, prefix: str, ratio: int, head_dim: int) -> Iterator[WeightSpec]:
    # Ratio 4 has two half-series side by side: an entry also reads the span before its own.
    inner = 2 * head_dim if ratio == 4 else head_dim
    yield _spec(f"{prefix}wkv.weight", (inner, config.hidden_size), Storage.BF16)
    yield _spec(f"{prefix}wgate.weight", (inner, config.hidden_size), Storage.BF16)
    yield _spec(f"{prefix}ape", (ratio, inner), Storage.FP32)
    yield _spec(f"{prefix}norm.weight", (head_dim,), Storage.BF16_WIDENED)


def _ffn(config: ModelConfig, prefix: str, is_hash: bool, is_fused: bool) -> Iterator[WeightSpec]:
    width, inner, num_experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    yield _spec(f"{prefix}gate.weight", (num_experts, width), Storage.BF16_WIDENED)
    if is_hash:
        table_shape = (config.vocab_size, config.num_experts_per_tok)
        yield _spec(f"{prefix}gate.tid2eid", table_shape, Storage.INT64)
    else:
        yield _spec(f"{prefix}gate.bias", (num_experts,), Storage.FP32)
    experts = f"{prefix}experts."
    if is_fused:
        yield _spec(f"{experts}w13", (num_experts, 2 * inner, width), Storage.BF16)
        yield _spec(f"{experts}w2", (num_experts, width, inner), Storage.BF16)
    else:
        yield from _experts(experts, num_experts, inner, width)
    shared = inner * config.n_shared_experts
    for leaf, shape in {"w1": (shared, width), "w2": (width, shared), "w3": (shared, width)}.items():
        yield _spec(f"{prefix}shared_experts.{leaf}.weight", shape, Storage.FP8)


def _experts(prefix: str, num_experts: int, inner: int, width: int) -> Iterator[WeightSpec]:
    gate, up = slice(0, inner), slice(inner, 2 * inner)
    for expert_idx in range(num_experts):
        parts = {
            "w1": ("w13", (inner, width), (expert_idx, gate)),
            "w2": ("w2", (width, inner), (expert_idx,)),
            "w3": ("w13", (inner, width), (expert_idx, up)),
        }
        for leaf, (stack, shape, where) in parts.items():
            name = f"{prefix}{expert_idx}.{leaf}.weight"
            yield WeightSpec(name, prefix + stack, shape, Storage.EXPERT, where)


# Names outside the blocks, other spelling to official.
_OUTER = {
    "embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
}

# Names inside a block, other spelling to official. The first is save_pretrained's, the rest a live model's.
_INNER = {
    "attn.norm.weight": "attn.kv_norm.weight",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.kv_proj.weight": "attn.compressor.wkv.weight",
    "self_attn.compressor.gate_proj.weight": "attn.compressor.wgate.weight",
    "self_attn.compressor.kv_norm.weight": "attn.compressor.norm.weight",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "self_attn.compressor.indexer.kv_proj.weight": "attn.indexer.compressor.wkv.weight",
    "self_attn.compressor.indexer.gate_proj.weight": "attn.indexer.compressor.wgate.weight",
    "self_attn.compressor.indexer.kv_norm.weight": "attn.indexer.compressor.norm.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "attn.indexer.wq_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "attn.indexer.weights_proj.weight",
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.experts.gate_up_proj": "ffn.experts.w13",
    "mlp.experts.down_proj": "ffn.experts.w2",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "attn_hc.fn": "hc_attn_fn",
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
}

_BLOCK_NAME = re.compile(r"((?:layers|mtp)\.\d+\.)(.+)")
_MTP_COPY = re.compile(r"mtp\.\d+\.(?:emb\.tok_emb|embed|head)\.weight")


def official_name(name: str) -> str:
    """Translate a tensor name of any known spelling.

    Args:
        name: a name in a file or a live model.

    Returns:
        The official name; unknown names come back without a leading "model." but otherwise as they are.
    """
    name = name.removeprefix("model.")
    match = _BLOCK_NAME.fullmatch(name)
    if match is None:
        return _OUTER.get(name, name)
    return match[1] + _INNER.get(match[2], match[2])


def huggingface_name(name: str) -> str:
    """The name that transformers' `save_pretrained` gives an official name.

    MTP tensors keep their official names, which transformers ignores when it loads.

    Args:
        name: official name.

    Returns:
        Its name in a Hugging Face checkpoint.
    """
    if name == "head.weight" or name.startswith("mtp."):
        return name
    if name == "embed.weight":
        return "model.embed_tokens.weight"
    if name.startswith("hc_head_"):
        return "model.hc_head.hc_" + name.removeprefix("hc_head_")
    if name.endswith(".attn.kv_norm.weight"):
        name = name.removesuffix("kv_norm.weight") + "norm.weight"
    return f"model.{name}"


def fused_experts_block(name: str) -> str | None:
    """Block prefix (such as "layers.3.") if the official name is that of stacked experts, else None."""
    prefix, found, leaf = name.partition("ffn.experts.")
    return prefix if found and leaf in ("w13", "w2") else None


def is_mtp_copy(name: str) -> bool:
    """Whether the official name is an MTP block's own copy of the embedding or the head, which are shared."""
    return _MTP_COPY.fullmatch(name) is not None
