"""A config.json's fields in either spelling, official or Hugging Face, as those of `ModelConfig`.

Owns the spellings: which fields must be there, which say the same thing twice and must agree. Whether the values
make a model is for `ModelConfig` to say. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polytempo.errors import ConfigError, unknown_option

LAYER_TYPE_RATIO = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
MLP_LAYER_TYPES = ("hash_moe", "moe")

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


def _object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that is a JSON object; an absent one and null are an empty one."""
    value = raw.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"config field {name!r} is {value!r}; it must be an object")
    return value or {}


def require_integer(name: str, value: Any, at_least: int) -> None:
    """Refuse a field that is no integer of at least `at_least`; true and false are none."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"config field {name!r} is {value!r}; it must be an integer of at least {at_least}")


def read_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelConfig`, by name, that a config.json gives.

    Args:
        raw: the parsed JSON object.

    Returns:
        Those of them that it names or implies; their values are checked as far as reading them needs.

    Raises:
        ConfigError: a field is missing, two fields disagree, or one has a value that this family has not.
    """
    missing = [name for name in _REQUIRED if raw.get(name) is None]
    if missing:
        raise ConfigError(f"config lacks the field(s) {', '.join(map(repr, missing))}")
    values = {name: raw[name] for name in _REQUIRED}
    for name, value in values.items():
        require_integer(name, value, at_least=1)
    for name, only in _FIXED.items():
        if raw.get(name) not in (None, only):
            raise ConfigError(f"config field {name!r} is {raw[name]!r}; this family has {only!r}")
    values.update({name: raw[name] for name in _PLAIN if raw.get(name) is not None})
    num_mtp = raw.get("num_nextn_predict_layers")
    values["num_nextn_predict_layers"] = 0 if num_mtp is None else num_mtp
    require_integer("num_nextn_predict_layers", values["num_nextn_predict_layers"], at_least=0)
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
                f"config field 'compress_ratios' has {len(ratios)} entries, fewer than num_hidden_layers ({num_layers})"
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


def _ratios_of_layer_types(raw: Mapping[str, Any], layer_types: list[str], num_layers: int) -> tuple[int, ...]:
    if len(layer_types) < num_layers:
        raise ConfigError(
            f"config field 'layer_types' has {len(layer_types)} entries, fewer than num_hidden_layers ({num_layers})"
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
