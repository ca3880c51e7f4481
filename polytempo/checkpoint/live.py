"""Wraps the weights of a live transformers model, without copying them. Imports no transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polytempo.checkpoint.checks import list_names
from polytempo.checkpoint.load import DTYPES
from polytempo.checkpoint.names import expected_weights, fused_experts_block, official_name
from polytempo.config import ModelConfig
from polytempo.errors import CheckpointError, ConfigError, unknown_option
from polytempo.model.deepseek_v4 import DeepseekV4


def share_transformers_model(hf_model: Any) -> DeepseekV4:
    """Build a model over the weights of a `transformers.DeepseekV4ForCausalLM`.

    The weights stay where they are and are shared: what trains one model changes the other. Only tensors that
    must be float32 here and are not there (the gates of a bfloat16 model; norms and hyper-connections too if
    it was cast as a whole) are copies: call this again after they have changed. transformers has no MTP
    block, so the result cannot speculate.

    Args:
        hf_model: the live model, float32 or bfloat16, on one device.

    Returns:
        The model, in eval mode and without gradients.

    Raises:
        ConfigError: it is another kind of model, or its config or dtype is not supported.
        CheckpointError: its tensors are not those that its config asks for.
    """
    raw = hf_model.config.to_dict()
    if raw.get("model_type") != "deepseek_v4":
        raise ConfigError(f"config field 'model_type' is {raw.get('model_type')!r}; expected 'deepseek_v4'")
    found = {official_name(name): value.detach() for name, value in hf_model.state_dict().items()}
    dtype = _dtype_of(found)
    config = ModelConfig.from_dict({**raw, "num_nextn_predict_layers": 0})
    config = replace(config, dtype=str(dtype).removeprefix("torch."))
    model = DeepseekV4(config, dtype, "meta")
    model.load_state_dict(_pick(config, found, dtype), assign=True)
    return model.requires_grad_(False).eval()


def _dtype_of(found: dict[str, Tensor]) -> torch.dtype:
    if "embed.weight" not in found:
        raise CheckpointError("the model has no embedding tensor (model.embed_tokens.weight)")
    dtype = found["embed.weight"].dtype
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(unknown_option("dtype of a live model", name, DTYPES))
    return dtype


def _pick(config: ModelConfig, found: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The state dict: every expected tensor, shared where its dtype allows."""
    fused = frozenset(filter(None, map(fused_experts_block, found)))
    specs = {spec.name: spec for spec in expected_weights(config, fused)}
    missing, unexpected = [n for n in specs if n not in found], [n for n in found if n not in specs]
    if missing or unexpected:
        raise CheckpointError(
            f"the live model's tensors do not fit its config; missing: {list_names(missing) or 'none'}; "
            f"unexpected: {list_names(unexpected) or 'none'}"
        )
    state = {}
    for name, spec in specs.items():
        value = found[name]
        if spec.where or value.shape != spec.shape:
            raise CheckpointError(f"tensor {name!r} has shape {tuple(value.shape)}; it cannot be shared")
        if value.device.type == "meta":
            raise CheckpointError(f"tensor {name!r} is on the meta device; load the model's weights first")
        state[spec.key] = value.to(spec.storage.memory_dtype(dtype))
    return state
