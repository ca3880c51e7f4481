"""ModelConfig: both spellings, the field cases of the ratio list, and refusals that name the field."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from polytempo.config import ModelConfig, read_json
from polytempo.errors import CheckpointError, ConfigError

OFFICIAL = {
    "vocab_size": 48, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_groups": 2,
    "o_lora_rank": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "index_head_dim": 16,
    "num_hash_layers": 1, "compress_ratios": [0, 4, 128, 4, 0], "num_nextn_predict_layers": 1,
    "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1,
    },
    "eos_token_id": 1, "torch_dtype": "bfloat16", "topk_method": "noaux_tc", "an_unknown_field": [1, 2],
}  # fmt: skip
KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
HUGGINGFACE = {
    **{name: value for name, value in OFFICIAL.items() if name not in (
        "num_hash_layers", "compress_ratios", "qk_rope_head_dim", "rope_scaling", "torch_dtype",
    )},
    "dtype": "bfloat16",
    "layer_types": [KINDS[0], KINDS[1], KINDS[2], KINDS[1]],
    "compress_rates": {KINDS[1]: 4, KINDS[2]: 128},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "partial_rotary_factor": 0.5,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5},
        "compress": {
            "rope_type": "yarn", "rope_theta": 160000, "factor": 16, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 65536, "attention_factor": 1.0, "partial_rotary_factor": 0.5,
        },
    },
}  # fmt: skip


def read(raw=OFFICIAL, **changes) -> ModelConfig:
    """Config of `raw` with some fields changed; None removes a field."""
    values = {**raw, **changes}
    return ModelConfig.from_dict({name: value for name, value in values.items() if value is not None})


def refused(*parts: str, raw=OFFICIAL, **changes) -> None:
    with pytest.raises(ConfigError) as caught:
        read(raw, **changes)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not named in: {caught.value}"


def test_both_spellings_are_one_config():
    assert read(OFFICIAL) == read(HUGGINGFACE)
    config = read()
    assert config.compress_ratios == (0, 4, 128, 4) and config.mtp_compress_ratios == (0,)
    assert [config.is_hash_layer(idx) for idx in range(4)] == [True, False, False, False]
    assert config.rope_for(0).theta == 10000 and config.rope_for(0).factor == 1.0
    assert config.rope_for(4) == config.rope_for(128)
    assert config.rope_for(4).theta == 160000 and config.rope_for(4).factor == 16
    assert config.dtype == "bfloat16" and config.eos_token_ids == (1,)


def test_rope_fields_in_every_mixture():
    # A flat `rope_parameters` is how transformers passes `rope_scaling` on; "rope_type" is its newer word.
    flat = {**OFFICIAL["rope_scaling"], "rope_type": "yarn"}
    del flat["type"]
    assert read(rope_scaling=None, rope_parameters=flat) == read()
    assert read(rope_scaling=flat) == read()
    assert read(rope_scaling=None).compress_rope.factor == 1.0
    # An explicit factor is honoured; YaRN's own amplitude is not derived.
    assert read(rope_scaling={**flat, "attention_factor": 1.25}).compress_rope.attention_factor == 1.25
    assert read().compress_rope.attention_factor == 1.0


@pytest.mark.parametrize("extra", [[], [0], [0, 0, 0]])
def test_ratio_list_may_be_longer(extra):
    assert read(compress_ratios=[0, 4, 128, 4, *extra]) == read()
    assert read(compress_ratios=[0, 4, 128, 4, *extra], num_nextn_predict_layers=0).mtp_compress_ratios == ()


def test_ratio_list_that_is_wrong():
    refused("compress_ratios", "3", "num_hidden_layers", "4", compress_ratios=[0, 4, 128])
    refused("compress_ratios", "entry 1", "2", compress_ratios=[0, 2, 128, 4])
    refused("compress_ratios", "entry 1", "4.0", compress_ratios=[0, 4.0, 128, 4])
    refused("compress_ratios", "list", compress_ratios={"0": 4})
    refused("compress_ratios", "layer_types", compress_ratios=None)
    # The MTP block's own entry is read, and only 0 is known.
    refused("MTP block 0", "4", compress_ratios=[0, 4, 128, 4, 4])


def test_config_built_by_hand_is_checked_too():
    for changes, part in (
        ({"compress_ratios": (0, 4)}, "compress_ratios.*2 entries.*4"),
        ({"mtp_compress_ratios": ()}, "mtp_compress_ratios.*0 entries"),
        ({"hidden_size": 0}, "hidden_size.*0"),
    ):
        with pytest.raises(ConfigError, match=part):
            replace(read(), **changes)


def test_layer_types_that_are_wrong():
    refused("layer_types", "3", "num_hidden_layers", raw=HUGGINGFACE, layer_types=KINDS)
    refused("layer_types", "entry 0", "did you mean", raw=HUGGINGFACE, layer_types=["sliding_atention", *KINDS])
    refused("compress_rates", "8", raw=HUGGINGFACE, compress_rates={KINDS[1]: 8})
    refused("compress_ratios", "layer_types", raw=HUGGINGFACE, compress_ratios=[0, 128, 4, 4])
    refused("mlp_layer_types", "entry 3", "dense", raw=HUGGINGFACE, mlp_layer_types=["moe"] * 3 + ["dense"])
    refused("mlp_layer_types", "hash_moe", raw=HUGGINGFACE, mlp_layer_types=["moe", "hash_moe", "moe", "moe"])


def test_ratio_list_beside_layer_types_adds_the_mtp_entry():
    # What our Hugging Face export writes.
    assert read(HUGGINGFACE, compress_ratios=[0, 4, 128, 4, 0]) == read()
    refused("MTP block 0", raw=HUGGINGFACE, compress_ratios=[0, 4, 128, 4, 128])


@pytest.mark.parametrize("count, blocks", [(None, 0), (0, 0), (1, 1)])
def test_mtp_count(count, blocks):
    assert read(num_nextn_predict_layers=count).num_mtp_blocks == blocks


@pytest.mark.parametrize("count", [2, 3, -1, "1", True, 1.0])
def test_mtp_count_that_is_wrong(count):
    refused("num_nextn_predict_layers", repr(count), num_nextn_predict_layers=count)


@pytest.mark.parametrize("name", ["vocab_size", "num_hidden_layers", "q_lora_rank", "n_routed_experts"])
def test_required_fields(name):
    refused(repr(name), **{name: None})
    for value in (0, -4, "4", 4.0, True):
        refused(repr(name), repr(value), **{name: value})


def test_optional_fields_are_checked_too():
    refused("sliding_window", "0", sliding_window=0)
    refused("num_hash_layers", "-1", num_hash_layers=-1)
    refused("num_hash_layers", "'2'", num_hash_layers="2")
    refused("scoring_func", "softmax", scoring_func="softmax")
    refused("norm_topk_prob", norm_topk_prob=False)
    refused("o_groups", "3", o_groups=3)
    refused("num_experts_per_tok", "5", num_experts_per_tok=5)


@pytest.mark.parametrize(
    "changes",
    [{"hidden_act": "gelu"}, {"num_key_value_heads": 2}, {"attention_bias": True}, {"mlp_bias": True}],
)
def test_another_family_is_refused(changes):
    # Read past, these would give a model that runs and is wrong.
    refused(*map(repr, changes), *map(repr, changes.values()), **changes)
    assert read(hidden_act="silu", num_key_value_heads=1, attention_bias=False) == read()


def test_rope_dim():
    refused("qk_rope_head_dim", "partial_rotary_factor", qk_rope_head_dim=None)
    refused("qk_rope_head_dim", "partial_rotary_factor", "disagree", partial_rotary_factor=0.25)
    refused("qk_rope_head_dim", "15", qk_rope_head_dim=15)
    refused("qk_rope_head_dim", "index_head_dim", index_head_dim=8)
    nested = dict(HUGGINGFACE)
    del nested["partial_rotary_factor"]
    assert read(nested) == read()


def test_rope_that_is_wrong():
    refused("'linear'", rope_scaling={"type": "linear", "factor": 4})
    refused("'factor'", rope_scaling={"type": "yarn", "original_max_position_embeddings": 8})
    refused("rope_theta", raw=HUGGINGFACE, rope_parameters={"main": {}, "compress": {}})


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters", "compress_rates", "quantization_config"])
def test_fields_that_must_be_objects(name):
    raw = {**HUGGINGFACE, "rope_parameters": None} if name == "rope_scaling" else HUGGINGFACE
    refused(name, "object", raw=raw, **{name: "fp8"})


def test_expert_dtype_in_either_place():
    assert read(expert_dtype="fp4").expert_dtype == "fp4"
    assert read(quantization_config={"expert_dtype": "fp8"}).expert_dtype == "fp8"
    assert read(quantization_config={"quant_method": "fp8"}).expert_dtype is None


def test_read_json(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match="no such file"):
        read_json(path)
    with pytest.raises(CheckpointError, match="no such directory"):
        read_json(tmp_path / "absent" / "config.json")
    for text in ("[1]", "{", '"x"'):
        path.write_text(text)
        with pytest.raises(CheckpointError, match="config.json"):
            read_json(path)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_json(path)
    path.write_text(json.dumps(OFFICIAL))
    assert ModelConfig.from_dir(tmp_path) == read()
