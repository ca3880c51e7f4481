"""The list of expected tensors against the model's own state dict and the release's size."""

from __future__ import annotations

import pytest
import torch
from checkpoint_helpers import tiny_config

from polytempo.checkpoint.names import (
    Storage,
    expected_weights,
    fused_experts_block,
    huggingface_name,
    is_mtp_copy,
    official_name,
)
from polytempo.config import ModelConfig
from polytempo.model.deepseek_v4 import DeepseekV4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_shared", [1, 2])
def test_specs_fill_the_state_dict_exactly(dtype, num_shared):
    config = tiny_config(n_shared_experts=num_shared)
    state = DeepseekV4(config, dtype, "meta").state_dict()
    filled = dict.fromkeys(state, 0)
    for spec in expected_weights(config):
        part = state[spec.key][spec.where]
        assert part.shape == spec.shape, spec
        assert part.dtype == spec.storage.memory_dtype(dtype), spec
        filled[spec.key] += part.numel()
    assert filled == {name: value.numel() for name, value in state.items()}


def test_gate_rows_come_before_up_rows():
    # w1 (gate) and w3 (up) have the same shape: swapped, every shape check passes and the text is garbage.
    specs = {spec.name: spec for spec in expected_weights(tiny_config())}
    assert specs["layers.2.ffn.experts.3.w1.weight"].where == (3, slice(0, 32))
    assert specs["layers.2.ffn.experts.3.w3.weight"].where == (3, slice(32, 64))
    assert specs["layers.2.ffn.experts.3.w2.weight"].key == "layers.2.ffn.experts.w2"


def test_release_has_as_many_tensors():
    # DeepSeek-V4-Flash: 69,187 tensors on disk, scales included.
    config = ModelConfig.from_dict({
        "vocab_size": 129280, "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 43,
        "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024,
        "o_groups": 8, "o_lora_rank": 1024, "n_routed_experts": 256, "num_experts_per_tok": 6,
        "num_hash_layers": 3, "num_nextn_predict_layers": 1,
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
    })  # fmt: skip
    specs = expected_weights(config)
    assert len(specs) + sum(spec.storage.is_quantised for spec in specs) == 69187
    shapes = {spec.name: spec.shape for spec in specs}
    assert shapes["layers.2.attn.indexer.compressor.wkv.weight"] == (256, 4096)
    assert shapes["layers.3.attn.compressor.ape"] == (128, 512)
    assert shapes["layers.0.attn.wo_a.weight"] == (8192, 4096)
    assert shapes["mtp.0.hc_head_fn"] == (4, 16384)


def test_both_spellings_name_each_tensor_once():
    names = [spec.name for spec in expected_weights(tiny_config())]
    assert len(set(names)) == len(names)
    assert [official_name(huggingface_name(name)) for name in names] == names
    assert [official_name(name) for name in names] == names
    scales = [spec.scale_name for spec in expected_weights(tiny_config()) if spec.storage.is_quantised]
    assert not set(scales) & set(names)


def test_small_decisions():
    assert official_name("model.layers.10.self_attn.compressor.indexer.q_b_proj.weight") == (
        "layers.10.attn.indexer.wq_b.weight"
    )
    assert official_name("lm_head.weight") == official_name("head.weight") == "head.weight"
    assert official_name("layers.0.unheard.of") == "layers.0.unheard.of"
    assert fused_experts_block("layers.3.ffn.experts.w13") == "layers.3."
    assert fused_experts_block("layers.3.ffn.experts.0.w2.weight") is None
    assert is_mtp_copy("mtp.0.emb.tok_emb.weight") and is_mtp_copy("mtp.0.head.weight")
    assert not is_mtp_copy("mtp.0.hnorm.weight")
    assert Storage.BF16_WIDENED.memory_dtype(torch.bfloat16) == torch.float32
