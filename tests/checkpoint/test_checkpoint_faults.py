"""Tensors and fields that contradict each other: each fault is found from the headers, before a model, and named."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_helpers import WQ_A, edit_config, edit_tensors, export_tiny, refused

from polytempo.checkpoint.headers import SINGLE_NAME
from polytempo.checkpoint.load import load_model
from polytempo.checkpoint.reader import read_checkpoint, survey_checkpoint
from polytempo.errors import ConfigError

pytestmark = pytest.mark.usefixtures("no_model")
EXPERT = "layers.1.ffn.experts.2.w1"


# Tensors


def test_tensor_under_two_spellings(single):
    edit_tensors(single, lambda t: t.update({"lm_head.weight": t["head.weight"].clone()}))
    refused(single, "lm_head.weight", "head.weight", SINGLE_NAME)


def test_missing_tensor(single):
    edit_tensors(single, lambda t: t.pop("layers.2.attn.compressor.ape"))
    refused(single, "missing", "layers.2.attn.compressor.ape")


def test_unknown_tensor(single):
    edit_tensors(single, lambda t: t.update({"layers.1.attn.rotary.freq": torch.zeros(3)}))
    refused(single, SINGLE_NAME, "layers.1.attn.rotary.freq", "unexpected")


def test_more_layers_than_the_config_says(single):
    edit_config(single, num_hidden_layers=3, compress_ratios=[0, 4, 128, 0])
    refused(single, SINGLE_NAME, "unexpected", "layers.3.attn.wq_a.weight")


def test_many_faults_are_cut(single):
    norms = [f"layers.{layer_idx}.{leaf}_norm.weight" for layer_idx in range(4) for leaf in ("attn", "ffn")]
    edit_tensors(single, lambda t: t.update({name: torch.zeros(3) for name in [*norms, "norm.weight"]}))
    message = refused(single, *norms)
    assert message.count("shape") == 8 and "1 more" in message.splitlines()[-1]


@pytest.mark.parametrize("name", ["norm.weight", f"{WQ_A}.weight", f"{EXPERT}.weight", f"{WQ_A}.scale"])
def test_wrong_shape(single, name):
    edit_tensors(single, lambda t: t.update({name: t[name].view(torch.uint8)[:-2].clone().view(t[name].dtype)}))
    refused(single, SINGLE_NAME, name, "shape")


def test_transposed_scale(single):
    # 160 x 32 would pass a check of the number of elements.
    name = f"{EXPERT}.scale"
    edit_tensors(single, lambda t: t.update({name: t[name].view(torch.uint8).t().contiguous()}))
    refused(single, name, "(5, 32)", "(32, 5)")


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("norm.weight", torch.int32),
        ("layers.0.ffn.gate.tid2eid", torch.float32),
        ("layers.1.attn.compressor.wkv.weight", torch.float8_e4m3fn),
        (f"{WQ_A}.weight", torch.int8),
        (f"{WQ_A}.weight", torch.float8_e5m2),
        (f"{WQ_A}.scale", torch.float32),
        (f"{EXPERT}.weight", torch.int16),
    ],
)
def test_wrong_dtype(single, name, dtype):
    edit_tensors(single, lambda t: t.update({name: t[name].float().to(dtype)}))
    refused(single, SINGLE_NAME, name, "dtype")


@pytest.mark.parametrize("stem", [WQ_A, EXPERT])
def test_quantised_weight_without_scale(single, stem):
    edit_tensors(single, lambda t: t.pop(f"{stem}.scale"))
    refused(single, SINGLE_NAME, f"{stem}.weight", f"{stem}.scale", "missing")


def test_scale_of_an_unquantised_weight(single):
    # Were it dropped, a weight that still needs scaling would be taken as it is.
    edit_tensors(single, lambda t: t.update({f"{WQ_A}.weight": t[f"{WQ_A}.weight"].to(torch.bfloat16)}))
    refused(single, SINGLE_NAME, f"{WQ_A}.weight", f"{WQ_A}.scale")


# Quantisation fields


@pytest.mark.parametrize("declared, hint", [("fp8", "which is fp4"), ("int4", "known: fp4, fp8")])
def test_expert_dtype_contradicts_the_tensors(single, declared, hint):
    edit_config(single, expert_dtype=declared)
    refused(single, "expert_dtype", declared, hint, "layers.0.ffn.experts.0.w1.weight", SINGLE_NAME)


def test_fp8_experts_declared_as_fp4(tmp_path):
    folder = export_tiny(tmp_path / "fp8", quantise="fp8")
    edit_config(folder, expert_dtype="fp4")
    refused(folder, "expert_dtype", "fp4", "layers.0.ffn.experts.0.w1.weight")


def test_expert_dtype_absent_is_read_from_the_tensors(single):
    edit_config(single, expert_dtype=None)
    notes = read_checkpoint(single).report.notes
    assert any("expert_dtype" in note and "fp4" in note for note in notes)


def test_expert_dtype_in_the_quantisation_config(single):
    values = json.loads((single / "config.json").read_text())
    edit_config(
        single,
        expert_dtype=None,
        quantization_config={**values["quantization_config"], "expert_dtype": "fp8"},
    )
    refused(single, "expert_dtype", "layers.0.ffn.experts.0.w1.weight")


def test_int8_experts_of_full_width_are_not_fp4(single):
    edit_config(single, expert_dtype=None)
    name = f"{EXPERT}.weight"
    edit_tensors(single, lambda t: t.update({name: torch.zeros(32, 160, dtype=torch.int8)}))
    refused(single, name, "(32, 80)")


def test_expert_dtype_of_unquantised_experts_is_a_note(tmp_path):
    folder = export_tiny(tmp_path / "plain", quantise=None)
    edit_config(folder, expert_dtype="fp4")
    assert any("unquantised" in note for note in read_checkpoint(folder).report.notes)


@pytest.mark.parametrize(
    "field, value",
    [("weight_block_size", [64, 64]), ("quant_method", "awq"), ("fmt", "e5m2"), ("scale_fmt", "fp32")],
)
def test_quantisation_that_is_not_the_familys(single, field, value):
    values = json.loads((single / "config.json").read_text())["quantization_config"]
    edit_config(single, quantization_config={**values, field: value})
    refused(single, f"quantization_config.{field}", str(value))


# MTP


def test_all_mtp_tensors_missing(single):
    edit_tensors(single, lambda t: [t.pop(name) for name in list(t) if name.startswith("mtp.")])
    checkpoint = read_checkpoint(single)
    report = checkpoint.report
    assert not report.can_speculate and report.num_mtp_parameters == 0
    assert checkpoint.config.num_mtp_blocks == 0
    assert any("MTP" in note for note in report.notes)
    assert "mtp.0.e_proj.weight" in report.missing
    names = [
        "mtp.0.e_proj.weight",
        "mtp.0.hc_head_fn",
        "mtp.0.ffn.experts.3.w2.weight",
        "mtp.0.attn.wkv.weight",
    ]
    refused(single, *names, require_mtp=True)


@pytest.mark.parametrize("name", ["mtp.0.hnorm.weight", "mtp.0.e_proj.weight", "mtp.0.e_proj.scale"])
@pytest.mark.parametrize("require_mtp", [False, True])
def test_one_mtp_tensor_missing(single, name, require_mtp):
    edit_tensors(single, lambda t: t.pop(name))
    refused(single, name, "missing", require_mtp=require_mtp)
    assert not survey_checkpoint(single).report.can_speculate or name.endswith("scale")


@pytest.mark.parametrize("count", [0, None])
def test_config_announces_no_mtp_block(single, count):
    edit_config(single, num_nextn_predict_layers=count)
    report = read_checkpoint(single).report
    assert not report.can_speculate and not report.missing
    assert "mtp.0.e_proj.weight" in report.ignored and "mtp.0.e_proj.scale" in report.ignored
    assert any("num_nextn_predict_layers" in note and "ignored" in note for note in report.notes)
    refused(single, "num_nextn_predict_layers", require_mtp=True)


def test_config_announces_three_mtp_blocks(single):
    edit_config(single, num_nextn_predict_layers=3)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers.*3"):
        load_model(single)


def test_second_mtp_block_in_the_files(single):
    edit_tensors(single, lambda t: t.update({"mtp.1.hnorm.weight": torch.zeros(160)}))
    refused(single, "mtp.1.hnorm.weight", SINGLE_NAME)


def test_mtp_copies_of_embedding_and_head_are_ignored(single):
    copies = {"mtp.0.emb.tok_emb.weight": torch.zeros(48, 160), "mtp.0.head.weight": torch.zeros(48, 160)}
    edit_tensors(single, lambda t: t.update(copies))
    report = read_checkpoint(single, require_mtp=True).report
    assert set(report.ignored) == set(copies) and report.can_speculate
    assert any("copies" in note for note in report.notes)
    # They alone are no MTP block.
    edit_tensors(single, lambda t: [t.pop(name) for name in list(t) if name.startswith("mtp.") and name not in copies])
    assert not read_checkpoint(single).report.can_speculate
