"""Damaged checkpoints: each fault is found from the headers, before a model is built, and named."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_helpers import edit_config, edit_index, export_tiny, read_tensors, write_tensors
from safetensors.torch import save_file

from polytempo.checkpoint.headers import INDEX_NAME, SINGLE_NAME
from polytempo.checkpoint.load import load_model
from polytempo.checkpoint.reader import read_checkpoint, survey_checkpoint
from polytempo.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.usefixtures("no_model")
WQ_A = "layers.1.attn.wq_a"
EXPERT = "layers.1.ffn.experts.2.w1"


@pytest.fixture
def single(tmp_path):
    """A quantised official checkpoint in one file."""
    return export_tiny(tmp_path / "single")


@pytest.fixture
def sharded(tmp_path):
    """The same in several shards."""
    folder = export_tiny(tmp_path / "sharded", max_shard_bytes=60_000)
    assert len(list(folder.glob("*.safetensors"))) >= 4
    return folder


def refused(folder, *parts: str, **options) -> str:
    """The error must name every part."""
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, **options)
    # The directory's own name, made from the test's, must not pass for the word that is looked for.
    message = str(caught.value).replace(str(folder), "")
    for part in parts:
        assert part in message, f"{part!r} is not named in: {message}"
    return message


def change(folder, edit) -> None:
    tensors = read_tensors(folder)
    edit(tensors)
    write_tensors(folder, tensors)


def shard_of(folder, name: str) -> str:
    return json.loads((folder / INDEX_NAME).read_text())["weight_map"][name]


# Files


def test_missing_shard(sharded):
    file = shard_of(sharded, f"{WQ_A}.weight")
    (sharded / file).unlink()
    refused(sharded, file, "missing shard")


@pytest.mark.parametrize("keep", [0.99, 0.5, 0.0])
def test_truncated_file(sharded, keep):
    file = sharded / shard_of(sharded, f"{WQ_A}.weight")
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    refused(sharded, file.name, "truncated")


def test_truncated_by_one_byte_names_the_tensor(single):
    file = single / SINGLE_NAME
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    refused(single, SINGLE_NAME, "truncated", "tensor '")


def test_bytes_after_the_last_tensor(single):
    file = single / SINGLE_NAME
    file.write_bytes(file.read_bytes() + b"\0\0")
    refused(single, SINGLE_NAME, "2 bytes follow")


def test_index_names_a_tensor_that_is_not_in_its_file(sharded):
    file = shard_of(sharded, f"{WQ_A}.weight")
    edit_index(sharded, layers__9__attn__made_up=file)
    refused(sharded, file, "layers.9.attn.made_up", INDEX_NAME)


def test_index_names_the_wrong_file(sharded):
    name = f"{WQ_A}.weight"
    right = shard_of(sharded, name)
    wrong = shard_of(sharded, "head.weight")
    assert right != wrong
    edit_index(sharded, **{name.replace(".", "__"): wrong})
    refused(sharded, right, wrong, name)


def test_index_leaves_a_tensor_out(sharded):
    name = f"{WQ_A}.weight"
    file = shard_of(sharded, name)
    edit_index(sharded, **{name.replace(".", "__"): None})
    refused(sharded, file, name, "does not list")


def test_tensor_in_two_shards(sharded):
    tensors = read_tensors(sharded)
    file_of = json.loads((sharded / INDEX_NAME).read_text())["weight_map"]
    write_tensors(sharded, tensors, file_of)
    name, twin = f"{WQ_A}.weight", "a-twin.safetensors"
    save_file({name: tensors[name], "x": torch.zeros(1)}, sharded / twin)
    edit_index(sharded, x=twin)
    refused(sharded, name, file_of[name], twin, "two files")


def test_tensor_under_two_spellings(single):
    change(single, lambda t: t.update({"lm_head.weight": t["head.weight"].clone()}))
    refused(single, "lm_head.weight", "head.weight", SINGLE_NAME)


def test_tensor_twice_in_one_header(single):
    file = single / SINGLE_NAME
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b'"embed.weight"', b'"head.weight" ')
    file.write_bytes(data[:8] + header + data[8 + length :])
    refused(single, SINGLE_NAME, "'head.weight' twice")


def test_header_that_contradicts_itself(single):
    file = single / SINGLE_NAME
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])

    def write(name, **fields):
        changed = {**header, name: {**header[name], **fields}}
        raw = json.dumps(changed).encode()
        file.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])

    write("embed.weight", shape=[48, 161])
    refused(single, SINGLE_NAME, "embed.weight", "malformed")
    write("embed.weight", data_offsets=[offset + 8 for offset in header["embed.weight"]["data_offsets"]])
    refused(single, SINGLE_NAME, "starts at byte")
    file.write_bytes((20).to_bytes(8, "little") + b"not json at all, no." + data[8 + length :])
    refused(single, SINGLE_NAME, "malformed")


def test_no_weights_at_all(single):
    (single / SINGLE_NAME).rename(single / "model-00001-of-00002.safetensors")
    refused(single, SINGLE_NAME, INDEX_NAME, "model-00001-of-00002.safetensors")


def test_stale_single_file_beside_an_index(sharded, single):
    (single / SINGLE_NAME).rename(sharded / SINGLE_NAME)
    refused(sharded, SINGLE_NAME, INDEX_NAME, "stale")


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/elsewhere.safetensors", "", 3])
def test_index_may_not_leave_the_directory(sharded, file):
    # The file outside is there, and whole.
    original = sharded / shard_of(sharded, "head.weight")
    (sharded.parent / "elsewhere.safetensors").write_bytes(original.read_bytes())
    edit_index(sharded, head__weight=file)
    refused(sharded, "head.weight", INDEX_NAME, "beside the index")


def test_malformed_index(sharded):
    (sharded / INDEX_NAME).write_text('{"weight_map": []}')
    refused(sharded, INDEX_NAME, "weight_map")
    (sharded / INDEX_NAME).write_text("{")
    refused(sharded, INDEX_NAME, "not JSON")


def test_missing_directory_or_config(single, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere.*no such directory"):
        load_model(tmp_path / "nowhere")
    (single / "config.json").unlink()
    refused(single, "config.json")


# Tensors


def test_missing_tensor(single):
    change(single, lambda t: t.pop("layers.2.attn.compressor.ape"))
    refused(single, "missing", "layers.2.attn.compressor.ape")


def test_unknown_tensor(single):
    change(single, lambda t: t.update({"layers.1.attn.rotary.freq": torch.zeros(3)}))
    refused(single, SINGLE_NAME, "layers.1.attn.rotary.freq", "unexpected")


def test_more_layers_than_the_config_says(single):
    edit_config(single, num_hidden_layers=3, compress_ratios=[0, 4, 128, 0])
    refused(single, SINGLE_NAME, "unexpected", "layers.3.attn.wq_a.weight")


def test_many_faults_are_cut(single):
    norms = [f"layers.{layer_idx}.{leaf}_norm.weight" for layer_idx in range(4) for leaf in ("attn", "ffn")]
    change(single, lambda t: t.update({name: torch.zeros(3) for name in [*norms, "norm.weight"]}))
    message = refused(single, *norms)
    assert message.count("shape") == 8 and "1 more" in message.splitlines()[-1]


@pytest.mark.parametrize("name", ["norm.weight", f"{WQ_A}.weight", f"{EXPERT}.weight", f"{WQ_A}.scale"])
def test_wrong_shape(single, name):
    change(single, lambda t: t.update({name: t[name].view(torch.uint8)[:-2].clone().view(t[name].dtype)}))
    refused(single, SINGLE_NAME, name, "shape")


def test_transposed_scale(single):
    # 160 x 32 would pass a check of the number of elements.
    name = f"{EXPERT}.scale"
    change(single, lambda t: t.update({name: t[name].view(torch.uint8).t().contiguous()}))
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
    change(single, lambda t: t.update({name: t[name].float().to(dtype)}))
    refused(single, SINGLE_NAME, name, "dtype")


@pytest.mark.parametrize("stem", [WQ_A, EXPERT])
def test_quantised_weight_without_scale(single, stem):
    change(single, lambda t: t.pop(f"{stem}.scale"))
    refused(single, SINGLE_NAME, f"{stem}.weight", f"{stem}.scale", "missing")


def test_scale_of_an_unquantised_weight(single):
    # Were it dropped, a weight that still needs scaling would be taken as it is.
    change(single, lambda t: t.update({f"{WQ_A}.weight": t[f"{WQ_A}.weight"].to(torch.bfloat16)}))
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
    change(single, lambda t: t.update({name: torch.zeros(32, 160, dtype=torch.int8)}))
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
    change(single, lambda t: [t.pop(name) for name in list(t) if name.startswith("mtp.")])
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
    change(single, lambda t: t.pop(name))
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
    change(single, lambda t: t.update({"mtp.1.hnorm.weight": torch.zeros(160)}))
    refused(single, "mtp.1.hnorm.weight", SINGLE_NAME)


def test_mtp_copies_of_embedding_and_head_are_ignored(single):
    copies = {"mtp.0.emb.tok_emb.weight": torch.zeros(48, 160), "mtp.0.head.weight": torch.zeros(48, 160)}
    change(single, lambda t: t.update(copies))
    report = read_checkpoint(single, require_mtp=True).report
    assert set(report.ignored) == set(copies) and report.can_speculate
    assert any("copies" in note for note in report.notes)
    # They alone are no MTP block.
    change(single, lambda t: [t.pop(name) for name in list(t) if name.startswith("mtp.") and name not in copies])
    assert not read_checkpoint(single).report.can_speculate
