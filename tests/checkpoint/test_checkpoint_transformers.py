"""Both directions with transformers: it reads our exports, we read its files and its live models."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from checkpoint_helpers import RAW_CONFIG, differing, random_model, randomise, read_tensors, write_tensors

from polytempo.checkpoint import load_model, share_transformers_model
from polytempo.checkpoint.export import export_model
from polytempo.errors import CheckpointError, ConfigError

transformers = pytest.importorskip("transformers")
IDS = torch.randint(0, 48, (1, 140), generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.fixture
def hf_model():
    """A tiny transformers model of random weights."""
    raw = {name: value for name, value in RAW_CONFIG.items() if name != "num_nextn_predict_layers"}
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**raw)).eval()
    randomise(model.state_dict(), RAW_CONFIG["n_routed_experts"])
    return model


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


def from_pretrained(folder, **options):
    loaded, info = transformers.DeepseekV4ForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return loaded.eval()


def test_we_read_save_pretrained(hf_model, tmp_path):
    hf_model.save_pretrained(tmp_path / "hf")
    model, report = load_model(tmp_path / "hf")
    assert report.form == "huggingface" and not report.can_speculate and model.config.num_mtp_blocks == 0
    assert not differing(model, share_transformers_model(hf_model))
    hf_model.save_pretrained(tmp_path / "sharded", max_shard_size="300KB")
    again, report = load_model(tmp_path / "sharded")
    assert len(report.files) > 2 and not differing(again, model)


def test_it_reads_our_huggingface_export(hf_model, tmp_path):
    # Our model has the same target and an MTP block, which transformers must ignore and we must get back.
    model = random_model()
    for name, value in share_transformers_model(hf_model).state_dict().items():
        model.state_dict()[name].copy_(value)
    export_model(model, tmp_path / "ours", to="huggingface", max_shard_bytes=300_000)
    loaded = from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(hf_model))
    restored, report = load_model(tmp_path / "ours", require_mtp=True)
    assert report.can_speculate and not differing(restored, model)
    assert restored.config.mtp_compress_ratios == (0,)
    # What it saves again has lost the MTP block, and loads here as a target that cannot speculate.
    loaded.save_pretrained(tmp_path / "saved")
    target, report = load_model(tmp_path / "saved")
    assert not report.can_speculate and not differing(target, share_transformers_model(hf_model))


def test_huggingface_names_are_save_pretraineds(hf_model, tmp_path):
    hf_model.save_pretrained(tmp_path / "hf")
    theirs = read_tensors(tmp_path / "hf")
    ours = read_tensors(export_model(random_model(), tmp_path / "ours", to="huggingface"))
    assert {name for name in ours if not name.startswith("mtp.")} == set(theirs)
    assert {name: value.shape for name, value in theirs.items()} == {name: ours[name].shape for name in theirs}
    theirs_config = json.loads((tmp_path / "hf/config.json").read_text())
    ours_config = json.loads((tmp_path / "ours/config.json").read_text())
    del theirs_config["rope_parameters"]["compress"]["type"]  # a left-over of the old spelling
    for name in ("layer_types", "mlp_layer_types", "rope_parameters", "compress_rates", "dtype"):
        assert ours_config[name] == theirs_config[name], name


def test_it_reads_our_unquantised_official_export(hf_model, tmp_path):
    target = share_transformers_model(hf_model)
    export_model(target, tmp_path / "official", to="official")
    assert torch.equal(logits(from_pretrained(tmp_path / "official", dtype=torch.float32)), logits(hf_model))


def test_both_forms_load_to_identical_models(tmp_path):
    # Field case 53: per-layer list or per-type table, old or new rope fields.
    model = random_model()
    official, _ = load_model(export_model(model, tmp_path / "a", to="official"))
    huggingface, _ = load_model(export_model(model, tmp_path / "b", to="huggingface"))
    assert not differing(official, huggingface)
    assert official.config == huggingface.config


def test_live_names_in_a_file_load_too(hf_model, tmp_path):
    hf_model.save_pretrained(tmp_path / "hf")
    expected, _ = load_model(tmp_path / "hf")
    write_tensors(tmp_path / "hf", {name: value.clone() for name, value in hf_model.state_dict().items()})
    assert "model.layers.0.mlp.experts.gate_up_proj" in read_tensors(tmp_path / "hf")
    model, _ = load_model(tmp_path / "hf")
    assert not differing(model, expected)


def test_sharing_shares_memory(hf_model):
    model = share_transformers_model(hf_model)
    theirs = {value.data_ptr() for value in hf_model.state_dict().values()}
    assert all(value.data_ptr() in theirs for value in model.state_dict().values())
    hf_model.model.layers[1].mlp.experts.gate_up_proj.data[2, 3, 4] = 77.0
    assert model.layers[1].ffn.experts.w13[2, 3, 4] == 77.0
    assert model.dtype == torch.float32 and model.config.num_mtp_blocks == 0 and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in hf_model.parameters())


def test_sharing_a_bfloat16_model_copies_only_what_must_be_float32(hf_model, tmp_path):
    hf_model.save_pretrained(tmp_path / "hf")
    narrow = from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    model = share_transformers_model(narrow)
    theirs = {value.data_ptr() for value in narrow.state_dict().values()}
    copied = {name for name, value in model.state_dict().items() if value.data_ptr() not in theirs}
    assert copied and all(name.endswith("ffn.gate.weight") for name in copied)
    assert model.dtype == torch.bfloat16 and model.config.dtype == "bfloat16"
    gate = model.layers[0].ffn.gate.weight
    assert gate.dtype == torch.float32
    assert torch.equal(gate, narrow.model.layers[0].mlp.gate.weight.float())


def test_what_cannot_be_shared_is_refused(hf_model):
    with pytest.raises(ConfigError, match="float16"):
        share_transformers_model(hf_model.half())
    hf_model.float()
    hf_model.model.layers[0].self_attn.q_a_proj.bias = torch.nn.Parameter(torch.zeros(32))
    with pytest.raises(CheckpointError, match="unexpected: .*q_a_proj.bias"):
        share_transformers_model(hf_model)
    with torch.device("meta"):
        empty = transformers.DeepseekV4ForCausalLM(hf_model.config)
    with pytest.raises(CheckpointError, match="meta"):
        share_transformers_model(empty)
    other = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(ConfigError, match="llama"):
        share_transformers_model(transformers.LlamaForCausalLM(other))
