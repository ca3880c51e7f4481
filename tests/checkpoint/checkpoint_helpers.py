"""Tiny models and checkpoints, and ways to damage them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polytempo.checkpoint.export import export_model
from polytempo.checkpoint.headers import INDEX_NAME, SINGLE_NAME
from polytempo.checkpoint.load import load_model
from polytempo.config import ModelConfig
from polytempo.errors import CheckpointError
from polytempo.model.deepseek_v4 import DeepseekV4

WQ_A = "layers.1.attn.wq_a"

# 160 wide: two fp8 blocks, the second of them ragged, and five fp4 runs.
RAW_CONFIG = {
    "vocab_size": 48,
    "hidden_size": 160,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "sliding_window": 16,
    "hc_mult": 2,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


def tiny_config(**changes) -> ModelConfig:
    """The config of the tests, with some raw fields changed."""
    return ModelConfig.from_dict({**RAW_CONFIG, **changes})


def randomise(state: dict[str, Tensor], num_experts: int, seed: int = 0) -> None:
    """Fill every tensor with its own random values, in place."""
    generator = torch.Generator().manual_seed(seed)
    for value in state.values():
        if value.dtype == torch.int64:
            value.copy_(torch.randint(0, num_experts, value.shape, generator=generator))
        else:
            value.copy_(torch.randn(value.shape, generator=generator) * 0.1)


def random_model(config: ModelConfig | None = None, dtype: torch.dtype = torch.float32, seed: int = 0) -> DeepseekV4:
    """A tiny model of random weights."""
    config = config or tiny_config()
    model = DeepseekV4(config, dtype, "cpu").requires_grad_(False).eval()
    randomise(model.state_dict(), config.n_routed_experts, seed)
    return model


def export_tiny(folder: Path, **options) -> Path:
    """Export a tiny random model, as official fp8 and fp4 unless told otherwise."""
    return export_model(random_model(), folder, **{"to": "official", "quantise": "fp8-fp4", **options})


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, read by safetensors alone."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def write_tensors(folder: Path, tensors: dict[str, Tensor], file_of: dict[str, str] | None = None) -> None:
    """Replace a checkpoint's weights; `file_of` gives each tensor's shard, by default there is one file."""
    for file in [*folder.glob("*.safetensors"), folder / INDEX_NAME]:
        file.unlink(missing_ok=True)
    if file_of is None:
        save_file(tensors, folder / SINGLE_NAME)
        return
    for file in sorted(set(file_of.values())):
        save_file({name: value for name, value in tensors.items() if file_of[name] == file}, folder / file)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def edit_config(folder: Path, **changes) -> None:
    """Change fields of config.json; None removes a field."""
    values = json.loads((folder / "config.json").read_text())
    values.update(changes)
    values = {name: value for name, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))


def edit_index(folder: Path, **changes) -> None:
    """Change entries of the index's weight map; None removes one. Dots are written as double underscores."""
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    for name, file in changes.items():
        index["weight_map"].pop(name.replace("__", "."), None)
        if file is not None:
            index["weight_map"][name.replace("__", ".")] = file
    path.write_text(json.dumps(index))


def shard_of(folder: Path, name: str) -> str:
    """The file that the index gives a tensor."""
    return json.loads((folder / INDEX_NAME).read_text())["weight_map"][name]


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite a checkpoint of one file with its tensors, by name, as `edit` leaves them."""
    tensors = read_tensors(folder)
    edit(tensors)
    write_tensors(folder, tensors)


def refused(folder: Path, *parts: str, **options) -> str:
    """The message that the folder is refused with; it must name every part."""
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, **options)
    # The directory's own name, made from the test's, must not pass for the word that is looked for.
    message = str(caught.value).replace(str(folder), "")
    for part in parts:
        assert part in message, f"{part!r} is not named in: {message}"
    return message


def bits(value: Tensor) -> Tensor:
    """The bytes of a tensor, so that -0.0 and 0.0 differ."""
    return value.contiguous().view(torch.uint8)


def differing(left: DeepseekV4, right: DeepseekV4) -> list[str]:
    """Names of the state-dict tensors that are not bit-identical, or that only one model has."""
    a, b = left.state_dict(), right.state_dict()
    only = sorted(a.keys() ^ b.keys())
    both = [name for name in a if name in b]
    return only + [n for n in both if a[n].dtype != b[n].dtype or not torch.equal(bits(a[n]), bits(b[n]))]


def store_one_expert_unquantised(folder: Path, spare: Path) -> str:
    """Break a tiny quantised checkpoint: one expert's weight, whose name is returned, is stored in another format."""
    tensors, plain = read_tensors(folder), read_tensors(export_tiny(spare, quantise=None))
    name = "layers.2.ffn.experts.3.w3"
    del tensors[f"{name}.scale"]
    tensors[f"{name}.weight"] = plain[f"{name}.weight"]
    write_tensors(folder, tensors)
    return name
