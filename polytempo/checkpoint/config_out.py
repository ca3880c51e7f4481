"""Writes a ModelConfig as config.json, in the spelling of either form. Knows nothing of tensors."""

from __future__ import annotations

import math
from typing import Any

from polytempo.checkpoint.names import FORMS
from polytempo.config import LAYER_TYPE_RATIO, ModelConfig, RopeConfig
from polytempo.errors import ConfigError, unknown_option

QUANTISATIONS = {"none": None, "fp8-fp4": "fp4", "fp8": "fp8"}
"""What `quantise` may say, and the `expert_dtype` that it means."""

_COMMON = (
    "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "n_routed_experts",
    "num_experts_per_tok", "n_shared_experts", "index_n_heads", "index_head_dim", "index_topk",
    "sliding_window", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "rms_norm_eps", "routed_scaling_factor",
    "swiglu_limit", "scoring_func", "norm_topk_prob", "num_nextn_predict_layers", "max_position_embeddings",
    "bos_token_id",
)  # fmt: skip


def config_to_dict(config: ModelConfig, form: str, dtype: str, quantise: str = "none") -> dict[str, Any]:
    """Spell a config so that both transformers and `ModelConfig.from_dict` read it.

    Args:
        config: the model's shape.
        form: "official" or "huggingface".
        dtype: of the weights that go with it, "float32" or "bfloat16".
        quantise: how the official form's weights are stored: "none", "fp8-fp4" or "fp8".

    Returns:
        A JSON object. In the Hugging Face form `compress_ratios`, which transformers ignores beside
        `layer_types`, keeps the MTP block's own entry.

    Raises:
        ConfigError: `form` or `quantise` is unknown, or the form cannot express the config.
    """
    if form not in FORMS:
        raise ConfigError(unknown_option("checkpoint form", form, FORMS))
    if quantise not in QUANTISATIONS:
        raise ConfigError(unknown_option("quantisation", quantise, QUANTISATIONS))
    eos = config.eos_token_ids
    values = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        **{name: getattr(config, name) for name in _COMMON},
        "eos_token_id": list(eos) if len(eos) > 1 else eos[0] if eos else None,
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": config.rope.theta,
        "compress_rope_theta": config.compress_rope.theta,
        "compress_ratios": [*config.compress_ratios, *config.mtp_compress_ratios],
    }
    extra = _official if form == "official" else _huggingface
    return {**values, **extra(config, dtype, quantise)}


def _official(config: ModelConfig, dtype: str, quantise: str) -> dict[str, Any]:
    plain = RopeConfig(theta=config.rope.theta)
    if config.rope != plain:
        raise ConfigError(f"the official form has no place for {config.rope!r}: its main RoPE is plain")
    values: dict[str, Any] = {
        "num_hash_layers": config.num_hash_layers,
        "topk_method": "noaux_tc",
        # What the quantised form does not quantise it stores as bfloat16, whatever the weights were before.
        "torch_dtype": dtype if quantise == "none" else "bfloat16",
    }
    if config.compress_rope.factor != 1.0:
        scaling = _yarn(config.compress_rope, "type")
        if config.compress_rope.attention_factor == 1.0:
            # The release does not write it, and readers of this family take 1.
            del scaling["attention_factor"]
        values["rope_scaling"] = scaling
    if quantise != "none":
        values["expert_dtype"] = QUANTISATIONS[quantise]
        values["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        }
    return values


def _huggingface(config: ModelConfig, dtype: str, quantise: str) -> dict[str, Any]:
    if quantise != "none":
        raise ConfigError(f"quantise={quantise!r} is for the official form; the Hugging Face form has none")
    layer_type = {ratio: name for name, ratio in LAYER_TYPE_RATIO.items()}
    fraction = _rotary_fraction(config)
    num_layers, num_hash = config.num_hidden_layers, config.num_hash_layers
    ropes = {"main": config.rope, "compress": config.compress_rope}
    return {
        "dtype": dtype,
        "layer_types": [layer_type[ratio] for ratio in config.compress_ratios],
        "compress_rates": {name: ratio for name, ratio in LAYER_TYPE_RATIO.items() if ratio},
        "mlp_layer_types": (["hash_moe"] * num_hash + ["moe"] * num_layers)[:num_layers],
        "partial_rotary_factor": fraction,
        "rope_parameters": {
            name: {**_nested_rope(rope), "partial_rotary_factor": fraction} for name, rope in ropes.items()
        },
    }


def _nested_rope(rope: RopeConfig) -> dict[str, Any]:
    values = {"rope_type": "default"} if rope.factor == 1.0 else _yarn(rope, "rope_type")
    return {**values, "rope_theta": rope.theta}


def _yarn(rope: RopeConfig, type_field: str) -> dict[str, Any]:
    return {
        type_field: "yarn",
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "attention_factor": rope.attention_factor,
    }


def _rotary_fraction(config: ModelConfig) -> float:
    """qk_rope_head_dim / head_dim, such that truncating head_dim * fraction gives the dimension back."""
    fraction = config.qk_rope_head_dim / config.head_dim
    while int(config.head_dim * fraction) < config.qk_rope_head_dim:
        fraction = math.nextafter(fraction, 1.0)
    return fraction
