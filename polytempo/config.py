"""A model's configuration: frozen, validated, torch-free. The only reader of config.json and environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polytempo.errors import CheckpointError, ConfigError, unknown_option

RATIOS = (0, 4, 128)
LAYER_TYPE_RATIO = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
MLP_LAYER_TYPES = ("hash_moe", "moe")
SCORING_FUNCS = ("sqrtsoftplus",)


@dataclass(frozen=True)
class RopeConfig:
    """RoPE of one kind of layer.

    Attributes:
        theta: frequency base.
        factor: YaRN's context extension factor; 1.0 means plain RoPE.
        original_max_position_embeddings: context before extension, in tokens; read by YaRN only.
        beta_fast: YaRN: rotations above which a frequency is kept.
        beta_slow: YaRN: rotations below which a frequency is divided by `factor`.
        attention_factor: multiplies cos and sin; 1.0 in this family, never YaRN's derived amplitude.
    """

    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Shape of one DeepSeek-V4 model; field names are those of the public config.json.

    `compress_ratios` holds one entry per decoder layer and `mtp_compress_ratios` one per MTP block;
    `num_hash_layers` counts the leading layers whose experts come from a table by token id.
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    num_experts_per_tok: int
    compress_ratios: tuple[int, ...]
    rope: RopeConfig
    compress_rope: RopeConfig
    n_shared_experts: int = 1
    num_hash_layers: int = 0
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    sliding_window: int = 128
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    scoring_func: str = "sqrtsoftplus"
    norm_topk_prob: bool = True
    num_nextn_predict_layers: int = 1
    mtp_compress_ratios: tuple[int, ...] = (0,)
    max_position_embeddings: int = 4096
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    expert_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE_FIELDS:
            _require_integer(name, getattr(self, name), at_least=1)
        for name in ("num_hash_layers", "num_nextn_predict_layers"):
            _require_integer(name, getattr(self, name), at_least=0)
        if len(self.compress_ratios) != self.num_hidden_layers:
            raise ConfigError(
                f"config field 'compress_ratios' has {len(self.compress_ratios)} entries for "
                f"{self.num_hidden_layers} layers ('num_hidden_layers'); it needs one per layer"
            )
        for layer_idx, ratio in enumerate(self.compress_ratios):
            if not isinstance(ratio, int) or ratio not in RATIOS:
                raise ConfigError(
                    f"config field 'compress_ratios' entry {layer_idx} is {ratio!r}; known ratios: {RATIOS}"
                )
        if len(self.mtp_compress_ratios) != self.num_nextn_predict_layers:
            raise ConfigError(
                f"'mtp_compress_ratios' has {len(self.mtp_compress_ratios)} entries for "
                f"{self.num_nextn_predict_layers} MTP blocks ('num_nextn_predict_layers')"
            )
        for block_idx, ratio in enumerate(self.mtp_compress_ratios):
            if ratio != 0:
                raise ConfigError(
                    f"config field 'compress_ratios' gives MTP block {block_idx} the ratio {ratio!r}; "
                    "MTP blocks attend over the window only, so their entry must be 0"
                )
        if self.num_nextn_predict_layers > 1:
            raise ConfigError(
                f"config field 'num_nextn_predict_layers' is {self.num_nextn_predict_layers}; "
                "at most 1 MTP block is supported"
            )
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > min(self.head_dim, self.index_head_dim):
            raise ConfigError(
                f"config field 'qk_rope_head_dim' is {self.qk_rope_head_dim}; it must be even and at most "
                f"head_dim ({self.head_dim}) and index_head_dim ({self.index_head_dim})"
            )
        if self.num_attention_heads % self.o_groups:
            raise ConfigError(
                f"config field 'o_groups' is {self.o_groups}; it must divide num_attention_heads "
                f"({self.num_attention_heads})"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ConfigError(
                f"config field 'num_experts_per_tok' is {self.num_experts_per_tok}, more than "
                f"n_routed_experts ({self.n_routed_experts})"
            )
        if self.scoring_func not in SCORING_FUNCS:
            raise ConfigError(
                f"config field 'scoring_func' is {self.scoring_func!r}; supported: {', '.join(SCORING_FUNCS)}"
            )
        if not self.norm_topk_prob:
            raise ConfigError("config field 'norm_topk_prob' is false; this family normalises expert weights")

    @property
    def num_mtp_blocks(self) -> int:
        """MTP blocks that the config announces (0 or 1)."""
        return self.num_nextn_predict_layers

    def is_hash_layer(self, layer_idx: int) -> bool:
        """Whether decoder layer `layer_idx` takes its experts from a table by token id."""
        return layer_idx < self.num_hash_layers

    def rope_for(self, ratio: int) -> RopeConfig:
        """RoPE of a layer with this compress ratio (plain for 0, compress base with YaRN otherwise)."""
        return self.compress_rope if ratio else self.rope

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json in the official or the Hugging Face spelling.

        Args:
            raw: the parsed JSON object. Fields that do not shape the model are ignored.

        Returns:
            The validated config.

        Raises:
            ConfigError: a field is missing, has an impossible value, or two fields disagree.
        """
        return cls(**_read_fields(raw))

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Read `path`/config.json.

        Args:
            path: a checkpoint directory.

        Returns:
            The validated config.

        Raises:
            CheckpointError: the directory or the file is absent, or the file is not a JSON object.
            ConfigError: as `from_dict`.
        """
        return cls.from_dict(read_json(Path(path) / "config.json"))


_POSITIVE_FIELDS = (
    "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "n_routed_experts",
    "num_experts_per_tok", "n_shared_experts", "index_n_heads", "index_head_dim", "index_topk",
    "sliding_window", "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings",
)  # fmt: skip

_REQUIRED = (
    "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "n_routed_experts", "num_experts_per_tok",
)  # fmt: skip

_PLAIN = (
    "n_shared_experts", "index_n_heads", "index_head_dim", "index_topk", "sliding_window", "hc_mult",
    "hc_sinkhorn_iters", "hc_eps", "rms_norm_eps", "routed_scaling_factor", "swiglu_limit", "scoring_func",
    "norm_topk_prob", "max_position_embeddings", "bos_token_id",
)  # fmt: skip


# Fields that shape the model and have one value in this family: another would be a different model.
_FIXED = {"hidden_act": "silu", "num_key_value_heads": 1, "attention_bias": False, "mlp_bias": False}


def _object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that is a JSON object; an absent one and null are an empty one."""
    value = raw.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"config field {name!r} is {value!r}; it must be an object")
    return value or {}


def _require_integer(name: str, value: Any, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"config field {name!r} is {value!r}; it must be an integer of at least {at_least}")


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object from a file.

    Args:
        path: the file.

    Returns:
        The object.

    Raises:
        CheckpointError: the file is absent, not UTF-8 JSON, or not an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        where = "the directory holds no such file" if path.parent.is_dir() else "no such directory"
        raise CheckpointError(f"{path}: {where}; a checkpoint directory needs {path.name}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return value


def _read_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    missing = [name for name in _REQUIRED if raw.get(name) is None]
    if missing:
        raise ConfigError(f"config lacks the field(s) {', '.join(map(repr, missing))}")
    values = {name: raw[name] for name in _REQUIRED}
    for name, value in values.items():
        _require_integer(name, value, at_least=1)
    for name, only in _FIXED.items():
        if raw.get(name) not in (None, only):
            raise ConfigError(f"config field {name!r} is {raw[name]!r}; this family has {only!r}")
    values.update({name: raw[name] for name in _PLAIN if raw.get(name) is not None})
    num_mtp = raw.get("num_nextn_predict_layers")
    values["num_nextn_predict_layers"] = 0 if num_mtp is None else num_mtp
    _require_integer("num_nextn_predict_layers", values["num_nextn_predict_layers"], at_least=0)
    values["compress_ratios"], values["mtp_compress_ratios"] = _read_ratios(raw, values)
    values["num_hash_layers"] = _read_num_hash_layers(raw)
    values["qk_rope_head_dim"] = _read_rope_dim(raw)
    values["rope"], values["compress_rope"] = _read_rope(raw)
    eos = raw.get("eos_token_id")
    values["eos_token_ids"] = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    values["dtype"] = raw.get("torch_dtype") or raw.get("dtype") or "bfloat16"
    quantization = _object(raw, "quantization_config")
    values["expert_dtype"] = raw.get("expert_dtype") or quantization.get("expert_dtype")
    return values


def _read_ratios(raw: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[tuple, tuple]:
    """Split the ratio list into decoder layers and MTP blocks, from either spelling."""
    num_layers, num_mtp = values["num_hidden_layers"], values["num_nextn_predict_layers"]
    ratios = raw.get("compress_ratios")
    layer_types = raw.get("layer_types")
    if isinstance(ratios, list):
        if len(ratios) < num_layers:
            raise ConfigError(
                f"config field 'compress_ratios' has {len(ratios)} entries, fewer than "
                f"num_hidden_layers ({num_layers})"
            )
        layers, extra = tuple(ratios[:num_layers]), tuple(ratios[num_layers:])
        if layer_types is not None and _ratios_of_layer_types(raw, layer_types, num_layers) != layers:
            raise ConfigError(
                f"config fields 'compress_ratios' {list(layers)} and 'layer_types' {layer_types} disagree"
            )
    elif ratios is not None:
        raise ConfigError(f"config field 'compress_ratios' is {ratios!r}; it must be a list")
    elif layer_types is not None:
        layers, extra = _ratios_of_layer_types(raw, layer_types, num_layers), ()
    else:
        raise ConfigError("config lacks both 'compress_ratios' and 'layer_types'; one is needed")
    return layers, (extra + (0,) * num_mtp)[:num_mtp]


def _ratios_of_layer_types(
    raw: Mapping[str, Any], layer_types: list[str], num_layers: int
) -> tuple[int, ...]:
    if len(layer_types) < num_layers:
        raise ConfigError(
            f"config field 'layer_types' has {len(layer_types)} entries, fewer than "
            f"num_hidden_layers ({num_layers})"
        )
    for layer_type, ratio in _object(raw, "compress_rates").items():
        if LAYER_TYPE_RATIO.get(layer_type, ratio) != ratio:
            raise ConfigError(
                f"config field 'compress_rates' gives {layer_type!r} the ratio {ratio!r}; this family has "
                f"{LAYER_TYPE_RATIO[layer_type]}"
            )
    for layer_idx, layer_type in enumerate(layer_types[:num_layers]):
        if layer_type not in LAYER_TYPE_RATIO:
            raise ConfigError(
                f"config field 'layer_types' entry {layer_idx}: "
                + unknown_option("layer type", str(layer_type), LAYER_TYPE_RATIO)
            )
    return tuple(LAYER_TYPE_RATIO[layer_type] for layer_type in layer_types[:num_layers])


def _read_num_hash_layers(raw: Mapping[str, Any]) -> int:
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return raw.get("num_hash_layers") or 0
    for layer_idx, kind in enumerate(kinds):
        if kind not in MLP_LAYER_TYPES:
            raise ConfigError(
                f"config field 'mlp_layer_types' entry {layer_idx}: "
                + unknown_option("layer type", str(kind), MLP_LAYER_TYPES)
            )
    num_hash = sum(kind == "hash_moe" for kind in kinds)
    if any(kind != "hash_moe" for kind in kinds[:num_hash]):
        raise ConfigError("config field 'mlp_layer_types' has a 'hash_moe' after a 'moe'; they come first")
    return num_hash


def _read_rope_dim(raw: Mapping[str, Any]) -> int:
    rope_dim = raw.get("qk_rope_head_dim")
    fraction = raw.get("partial_rotary_factor")
    if fraction is None:
        fraction = _object(_object(raw, "rope_parameters"), "main").get("partial_rotary_factor")
    if fraction is None:
        if rope_dim is None:
            raise ConfigError("config lacks both 'qk_rope_head_dim' and 'partial_rotary_factor'")
        return rope_dim
    rotated = round(raw["head_dim"] * fraction)
    if rope_dim not in (None, rotated):
        raise ConfigError(
            f"config fields 'qk_rope_head_dim' ({rope_dim!r}) and 'partial_rotary_factor' ({fraction!r} of "
            f"head_dim {raw['head_dim']}) disagree"
        )
    return rotated


def _read_rope(raw: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    nested = _object(raw, "rope_parameters")
    if isinstance(nested.get("main"), dict) and isinstance(nested.get("compress"), dict):
        return _one_rope(nested["main"], None), _one_rope(nested["compress"], None)
    scaling = _object(raw, "rope_scaling") or nested
    plain = RopeConfig(theta=float(raw.get("rope_theta", 10000.0)))
    return plain, _one_rope(scaling, float(raw.get("compress_rope_theta", 160000.0)))


def _one_rope(params: Mapping[str, Any], theta: float | None) -> RopeConfig:
    """Read one rope dict; `theta` wins over the dict's own base, which in the flat form is the main one."""
    kind = params.get("rope_type") or params.get("type") or "default"
    if theta is None:
        if params.get("rope_theta") is None:
            raise ConfigError("config field 'rope_parameters' lacks a 'rope_theta'")
        theta = float(params["rope_theta"])
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind != "yarn":
        raise ConfigError(f"rope type {kind!r} is not supported; known: 'default', 'yarn'")
    names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")
    given = {name: params[name] for name in names if params.get(name) is not None}
    for name in ("factor", "original_max_position_embeddings"):
        if name not in given:
            raise ConfigError(f"the config's yarn rope parameters lack {name!r}")
    return RopeConfig(theta=theta, **given)


def cache_dir() -> Path:
    """Where built kernels are kept: $XDG_CACHE_HOME/polytempo, by default ~/.cache/polytempo."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "polytempo"
