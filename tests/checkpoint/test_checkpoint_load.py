"""Loading: right values in the right places, whatever the sharding and the dtypes of scales and model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import (
    bits,
    differing,
    edit_config,
    export_tiny,
    random_model,
    read_tensors,
    tiny_config,
    write_tensors,
)

from polytempo.checkpoint import load
from polytempo.checkpoint.export import export_model
from polytempo.checkpoint.headers import INDEX_NAME
from polytempo.checkpoint.load import load_model, resolve_dtype
from polytempo.errors import CheckpointError, ConfigError

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def dequantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A slow dequantisation of a whole checkpoint, element by element, to float32."""
    result = {}
    for name, value in tensors.items():
        scale = tensors.get(name.removesuffix(".weight") + ".scale")
        if name.endswith(".scale"):
            continue
        if scale is None or not name.endswith(".weight"):
            result[name] = value.float() if value.is_floating_point() else value
            continue
        power = torch.exp2(scale.view(torch.uint8).double() - 127).float()
        if value.dtype == torch.int8:
            codes = value.view(torch.uint8)
            nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
            signs = torch.where(nibbles >= 8, -1.0, 1.0)
            result[name] = signs * E2M1[nibbles & 7] * power.repeat_interleave(32, 1)
        else:
            rows, columns = value.shape
            factors = power.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            result[name] = value.float() * factors
    return result


@pytest.mark.parametrize("band", [1, load._BAND_ELEMENTS])
@pytest.mark.parametrize("quantise", ["fp8-fp4", "fp8"])
def test_quantised_equals_the_dequantised_checkpoint(tmp_path, monkeypatch, quantise, band):
    # At band 1 a weight of 160 rows is decoded in two pieces.
    monkeypatch.setattr(load, "_BAND_ELEMENTS", band)
    folder = export_tiny(tmp_path / "quantised", quantise=quantise)
    model, report = load_model(folder, dtype="float32")
    codes = {"fp8-fp4": {"I8", "F8_E4M3"}, "fp8": {"F8_E4M3"}}[quantise]
    assert codes <= set(report.bytes_by_dtype) and report.can_speculate
    plain = export_tiny(tmp_path / "plain", quantise=None)
    write_tensors(plain, dequantised(read_tensors(folder)))
    expected, _ = load_model(plain, dtype="float32")
    assert not differing(model, expected)
    # The fixture is not degenerate: quantising did change the weights.
    assert not torch.equal(model.layers[1].attn.wq_a.weight, random_model().layers[1].attn.wq_a.weight)
    # Every value of both formats fits bfloat16.
    narrow, _ = load_model(folder, dtype="bfloat16")
    for name, value in model.state_dict().items():
        assert torch.equal(narrow.state_dict()[name].to(value.dtype), value), name


def test_uint8_scales_mean_the_same(tmp_path):
    folder = export_tiny(tmp_path / "model")
    expected, _ = load_model(folder)
    tensors = read_tensors(folder)
    as_bytes = {n: v.view(torch.uint8) if v.dtype == torch.float8_e8m0fnu else v for n, v in tensors.items()}
    assert any(value.dtype == torch.uint8 for value in as_bytes.values())
    write_tensors(folder, as_bytes)
    model, _ = load_model(folder)
    assert not differing(model, expected)


@pytest.mark.parametrize("as_uint8", [False, True])
@pytest.mark.parametrize("stem", ["layers.1.attn.wq_a", "layers.1.ffn.experts.2.w1"])
def test_nan_scale_is_refused(tmp_path, stem, as_uint8):
    folder = export_tiny(tmp_path / "model")
    tensors = read_tensors(folder)
    scale = tensors[f"{stem}.scale"].view(torch.uint8).clone()
    scale[-1, -1] = 0xFF
    tensors[f"{stem}.scale"] = scale if as_uint8 else scale.view(torch.float8_e8m0fnu)
    write_tensors(folder, tensors)
    with pytest.raises(CheckpointError, match=f"{stem}.scale.*0xFF") as caught:
        load_model(folder)
    assert f"{stem}.weight" in str(caught.value) and "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("name", ["layers.2.attn.compressor.ape", "layers.0.attn.wo_b.weight"])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_weight_that_is_not_finite_is_refused(tmp_path, name, bad):
    folder = export_tiny(tmp_path / "model", quantise=None)
    tensors = read_tensors(folder)
    tensors[name][3, 5] = bad
    write_tensors(folder, tensors)
    with pytest.raises(CheckpointError, match=f"{name}.*not finite"):
        load_model(folder)


def test_fp8_nan_code_is_refused(tmp_path):
    folder = export_tiny(tmp_path / "model")
    tensors = read_tensors(folder)
    tensors["layers.0.attn.wo_b.weight"].view(torch.uint8)[3, 5] = 0x7F
    write_tensors(folder, tensors)
    with pytest.raises(CheckpointError, match="layers.0.attn.wo_b.weight.*not finite"):
        load_model(folder)


@pytest.mark.parametrize("bad", [4, -1])
def test_expert_id_out_of_range_is_refused(tmp_path, bad):
    folder = export_tiny(tmp_path / "model")
    tensors = read_tensors(folder)
    tensors["layers.0.ffn.gate.tid2eid"][7, 1] = bad
    write_tensors(folder, tensors)
    with pytest.raises(CheckpointError, match="layers.0.ffn.gate.tid2eid.*n_routed_experts"):
        load_model(folder)


@pytest.mark.parametrize("layout", ["scales apart", "scattered"])
def test_weight_and_scale_in_different_shards(tmp_path, layout):
    folder = export_tiny(tmp_path / "model")
    expected, _ = load_model(folder)
    tensors = read_tensors(folder)
    names = sorted(tensors)
    # Shard names in the opposite order of the tensors, and the index lists them in yet another.
    if layout == "scales apart":
        file_of = {name: "b.safetensors" if name.endswith(".scale") else "a.safetensors" for name in names}
    else:
        file_of = {name: f"shard-{7 - idx * 5 % 8}.safetensors" for idx, name in enumerate(names)}
        apart = [n for n in names if n.endswith(".scale") and file_of.get(n[:-5] + "weight") != file_of[n]]
        assert len(apart) > 20
    write_tensors(folder, tensors, dict(reversed(file_of.items())))
    model, report = load_model(folder)
    assert not differing(model, expected)
    assert set(report.files) == set(file_of.values())


def test_one_shard_is_open_at_a_time(tmp_path, monkeypatch):
    folder = export_tiny(tmp_path / "model", max_shard_bytes=60_000)
    num_open, most = 0, 0

    class Counted:
        def __init__(self, *args, **kwargs):
            self.inner = original(*args, **kwargs)

        def __enter__(self):
            nonlocal num_open, most
            num_open += 1
            most = max(most, num_open)
            return self.inner.__enter__()

        def __exit__(self, *error):
            nonlocal num_open
            num_open -= 1
            return self.inner.__exit__(*error)

    original = load.safe_open
    monkeypatch.setattr(load, "safe_open", Counted)
    _, report = load_model(folder)
    assert len(report.files) > 3 and most == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_in_memory(tmp_path, dtype):
    folder = export_tiny(tmp_path / "model")
    model, _ = load_model(folder, dtype=dtype)
    reference = random_model(dtype=dtype).state_dict()
    for name, value in model.state_dict().items():
        assert value.dtype == reference[name].dtype, name
        assert not value.requires_grad
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_auto_is_the_configs_dtype(tmp_path):
    folder = export_model(random_model(dtype=torch.bfloat16), tmp_path / "model")
    assert load_model(folder)[0].dtype == torch.bfloat16
    edit_config(folder, torch_dtype="float32")
    assert load_model(folder)[0].dtype == torch.float32
    edit_config(folder, torch_dtype=None, dtype="float32")
    assert load_model(folder)[0].dtype == torch.float32
    edit_config(folder, dtype="float16")
    with pytest.raises(ConfigError, match="torch_dtype.*float16"):
        load_model(folder)
    assert load_model(folder, dtype="bfloat16")[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["fp32", torch.float16, "float64", None])
def test_unknown_dtype_is_refused(dtype):
    with pytest.raises(ConfigError, match=str(dtype).removeprefix("torch.")):
        resolve_dtype(dtype, tiny_config())


def test_missing_mtp_leaves_the_target_as_it_was(tmp_path):
    # Field case 52: without its draft weights a checkpoint must still load, and be the same target.
    folder = export_tiny(tmp_path / "model")
    expected, _ = load_model(folder)
    tensors = {n: v for n, v in read_tensors(folder).items() if not n.startswith("mtp.")}
    write_tensors(folder, tensors)
    model, report = load_model(folder)
    assert not report.can_speculate and len(model.mtp) == 0 and model.config.num_mtp_blocks == 0
    only_mtp = differing(model, expected)
    assert only_mtp and all(name.startswith("mtp.") for name in only_mtp)


def test_ratios_of_any_extra_length_give_the_same_decoder(tmp_path):
    # Field case 53: the list may be longer, for draft blocks.
    folder = export_tiny(tmp_path / "model")
    expected, _ = load_model(folder)
    for ratios in ([0, 4, 128, 4], [0, 4, 128, 4, 0], [0, 4, 128, 4, 0, 0, 0]):
        edit_config(folder, compress_ratios=ratios)
        model, report = load_model(folder)
        assert not differing(model, expected) and report.layer_ratios == (0, 4, 128, 4)
    edit_config(folder, compress_ratios=[0, 4, 128])
    with pytest.raises(ConfigError, match="compress_ratios.*3.*num_hidden_layers.*4"):
        load_model(folder)


def test_progress_bar_only_on_a_terminal(tmp_path, monkeypatch, capsys):
    folder = export_tiny(tmp_path / "model")
    load_model(folder)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    load_model(folder, progress=False)
    assert capsys.readouterr().err == ""
    load_model(folder)
    assert "loading" in capsys.readouterr().err


@pytest.mark.long
def test_peak_memory():
    # Field case 55: the whole checkpoint was held to pair weights with scales.
    script = Path(__file__).parents[2] / "benchmarks/loading.py"
    output = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout
    assert json.loads(output.splitlines()[-1])["within_bound"], output


def test_report_counts(tmp_path):
    folder = export_tiny(tmp_path / "model", max_shard_bytes=60_000)
    model, report = load_model(folder)
    floats = {n: v for n, v in model.state_dict().items() if v.is_floating_point()}
    assert report.num_parameters == sum(value.numel() for value in floats.values())
    assert report.num_mtp_parameters == sum(v.numel() for n, v in floats.items() if n.startswith("mtp."))
    tensors = read_tensors(folder)
    assert sum(report.bytes_by_dtype.values()) == sum(bits(value).numel() for value in tensors.values())
    assert sorted(report.found) == sorted(name for name in tensors if not name.endswith(".scale"))
    assert report.form == "official" and not report.problems and not report.missing
    assert json.loads((folder / INDEX_NAME).read_text())["metadata"]["total_size"] == sum(
        report.bytes_by_dtype.values()
    )
