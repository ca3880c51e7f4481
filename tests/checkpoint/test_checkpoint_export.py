"""Export: bit-for-bit round trips, the layout of the files, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_helpers import differing, export_tiny, random_model, read_tensors, tiny_config

from polytempo.checkpoint import export
from polytempo.checkpoint.config_out import config_to_dict
from polytempo.checkpoint.export import export_model
from polytempo.checkpoint.headers import INDEX_NAME, read_entries
from polytempo.checkpoint.load import load_model
from polytempo.checkpoint.quant import fake_quantise_fp4, fake_quantise_fp8
from polytempo.config import ModelConfig
from polytempo.errors import CheckpointError, ConfigError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["official", "huggingface"])
@pytest.mark.parametrize("max_shard_bytes", [2**30, 50_000])
def test_unquantised_round_trip_is_bit_for_bit(tmp_path, dtype, form, max_shard_bytes):
    model = random_model(dtype=dtype)
    export_model(model, tmp_path / "a", to=form, max_shard_bytes=max_shard_bytes)
    loaded, report = load_model(tmp_path / "a")
    assert not differing(model, loaded)
    assert report.form == form and report.can_speculate and not report.notes
    export_model(loaded, tmp_path / "b", to=form, max_shard_bytes=max_shard_bytes)
    again, _ = load_model(tmp_path / "b")
    assert not differing(model, again)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantise", ["fp8-fp4", "fp8"])
def test_quantised_round_trip_is_bit_for_bit(tmp_path, dtype, quantise):
    export_tiny(tmp_path / "a", quantise=quantise)
    first, _ = load_model(tmp_path / "a", dtype=dtype)
    export_model(first, tmp_path / "b", quantise=quantise)
    second, _ = load_model(tmp_path / "b", dtype=dtype)
    assert not differing(first, second)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_quantised_export_is_the_fake_quantised_model(tmp_path):
    # A training script rounds with fake_quantise_*: what it measures must be what the checkpoint gives back.
    model = random_model()
    loaded, _ = load_model(export_model(model, tmp_path / "a", quantise="fp8-fp4"))
    before, after = model.layers[1], loaded.layers[1]
    width = before.ffn.experts.w13.shape[1] // 2
    for rows in (slice(0, width), slice(width, None)):
        expected = fake_quantise_fp4(before.ffn.experts.w13[:, rows])
        assert torch.equal(after.ffn.experts.w13[:, rows], expected)
    assert torch.equal(after.attn.wo_b.weight, fake_quantise_fp8(before.attn.wo_b.weight))
    assert torch.equal(after.attn.indexer.wq_b.weight, fake_quantise_fp8(before.attn.indexer.wq_b.weight))
    for leaf in (lambda block: block.attn_norm.weight, lambda block: block.ffn.gate.weight):
        assert torch.equal(leaf(after), leaf(before).bfloat16().float())
    assert torch.equal(after.hc_attn.fn, before.hc_attn.fn) and torch.equal(after.ffn.gate.bias, before.ffn.gate.bias)


def test_official_layout(tmp_path):
    entries = {entry.name: entry for entry in read_entries(export_tiny(tmp_path / "a"))}
    expected = {
        "embed.weight": ("BF16", (48, 160)),
        "norm.weight": ("BF16", (160,)),
        "hc_head_fn": ("F32", (2, 320)),
        "layers.1.hc_attn_scale": ("F32", (3,)),
        "layers.1.attn.wq_a.weight": ("F8_E4M3", (32, 160)),
        "layers.1.attn.wq_a.scale": ("F8_E8M0", (1, 2)),
        "layers.1.attn.attn_sink": ("F32", (4,)),
        "layers.1.attn.compressor.ape": ("F32", (4, 64)),
        "layers.1.attn.compressor.wkv.weight": ("BF16", (64, 160)),
        "layers.1.attn.indexer.weights_proj.weight": ("BF16", (2, 160)),
        "layers.1.attn.indexer.wq_b.weight": ("F8_E4M3", (32, 32)),
        "layers.1.ffn.gate.weight": ("BF16", (4, 160)),
        "layers.1.ffn.gate.bias": ("F32", (4,)),
        "layers.0.ffn.gate.tid2eid": ("I64", (48, 2)),
        "layers.1.ffn.experts.3.w1.weight": ("I8", (32, 80)),
        "layers.1.ffn.experts.3.w1.scale": ("F8_E8M0", (32, 5)),
        "layers.1.ffn.experts.3.w2.weight": ("I8", (160, 16)),
        "layers.1.ffn.experts.3.w2.scale": ("F8_E8M0", (160, 1)),
        "layers.1.ffn.shared_experts.w2.weight": ("F8_E4M3", (160, 32)),
        "mtp.0.e_proj.weight": ("F8_E4M3", (160, 160)),
        "mtp.0.e_proj.scale": ("F8_E8M0", (2, 2)),
        "mtp.0.enorm.weight": ("BF16", (160,)),
    }
    assert {name: (entries[name].dtype, entries[name].shape) for name in expected} == expected
    raw = json.loads((tmp_path / "a/config.json").read_text())
    assert raw["expert_dtype"] == "fp4" and raw["compress_ratios"] == [0, 4, 128, 4, 0]
    assert raw["quantization_config"] == {
        "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }  # fmt: skip


def test_shards_stay_below_the_limit(tmp_path):
    folder = export_tiny(tmp_path / "a", max_shard_bytes=50_000)
    sizes: dict[str, int] = {}
    for entry in read_entries(folder):
        sizes[entry.file] = sizes.get(entry.file, 0) + entry.num_bytes
    assert len(sizes) > 4 and max(sizes.values()) <= 50_000
    # No shard could have taken the next one's first tensors as well: none is needlessly small.
    assert sum(sizes.values()) / len(sizes) > 25_000


def test_options_are_checked(tmp_path):
    model = random_model()
    with pytest.raises(ConfigError, match="offical.*did you mean 'official'"):
        export_model(model, tmp_path / "a", to="offical")
    with pytest.raises(ConfigError, match="fp4-fp8.*did you mean"):
        export_model(model, tmp_path / "a", quantise="fp4-fp8")
    with pytest.raises(ConfigError, match="official"):
        export_model(model, tmp_path / "a", to="huggingface", quantise="fp8-fp4")
    narrow = random_model(tiny_config(moe_intermediate_size=40))
    with pytest.raises(ConfigError, match="moe_intermediate_size.*40.*32"):
        export_model(narrow, tmp_path / "a", quantise="fp8-fp4")
    assert not any(tmp_path.iterdir())
    assert not differing(narrow, load_model(export_model(narrow, tmp_path / "a"))[0])


def test_non_empty_directory_is_kept(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "thesis.txt").write_text("only copy")
    with pytest.raises(CheckpointError, match="overwrite"):
        export_tiny(folder)
    with pytest.raises(CheckpointError, match="thesis.txt.*is a file"):
        export_tiny(folder / "thesis.txt", overwrite=True)
    assert [file.name for file in folder.iterdir()] == ["thesis.txt"]
    export_tiny(folder, overwrite=True, max_shard_bytes=50_000)
    assert (folder / INDEX_NAME).exists()
    export_tiny(folder, overwrite=True)
    assert (folder / "thesis.txt").read_text() == "only copy"
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "thesis.txt",
    ]
    load_model(folder)


def test_failed_export_leaves_nothing(tmp_path, monkeypatch):
    model = random_model()
    model.mtp[0].e_proj.weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="mtp.0.e_proj.weight"):
        export_model(model, tmp_path / "a", quantise="fp8-fp4")
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr(export, "save_file", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_tiny(tmp_path / "a")
    assert not any(tmp_path.iterdir())


def test_tokenizer_files_are_copied(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(CheckpointError, match="source.*tokenizer.json"):
        export_tiny(tmp_path / "a", tokenizer_dir=source)
    for name in ("tokenizer.json", "tokenizer_config.json", "notes.txt", "config.json"):
        (source / name).write_text(name)
    folder = export_tiny(tmp_path / "a", tokenizer_dir=source)
    assert (folder / "tokenizer.json").read_text() == "tokenizer.json"
    assert (folder / "tokenizer_config.json").exists() and not (folder / "notes.txt").exists()
    load_model(folder)


@pytest.mark.parametrize("form", ["official", "huggingface"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_nextn_predict_layers": 0},
        {"rope_scaling": None},
        {"eos_token_id": [1, 7], "bos_token_id": None},
        {"head_dim": 49, "qk_rope_head_dim": 14, "index_head_dim": 16},
        {
            "hc_sinkhorn_iters": 7,
            "hc_eps": 1e-5,
            "rms_norm_eps": 1e-5,
            "swiglu_limit": 3.5,
            "num_hash_layers": 3,
        },
        {"rope_scaling": {**tiny_config().compress_rope.__dict__, "type": "yarn", "attention_factor": 1.2}},
    ],
)
def test_config_survives_its_spelling(form, changes):
    config = tiny_config(**changes)
    values = json.loads(json.dumps(config_to_dict(config, form, "bfloat16")))
    assert ModelConfig.from_dict(values) == config


def test_quantised_config_survives_too():
    config = tiny_config(expert_dtype="fp4")
    assert ModelConfig.from_dict(config_to_dict(config, "official", "bfloat16", "fp8-fp4")) == config
    # What was once read from an fp4 file is not fp4 when it is written without quantisation.
    assert ModelConfig.from_dict(config_to_dict(config, "official", "bfloat16")).expert_dtype is None


def test_names_do_not_depend_on_the_quantisation(tmp_path):
    plain = read_tensors(export_tiny(tmp_path / "a", quantise=None))
    quantised = read_tensors(export_tiny(tmp_path / "b"))
    assert {name for name in quantised if not name.endswith(".scale")} == set(plain)


def test_rotary_fraction_survives_truncation():
    # transformers truncates head_dim * fraction: 49 * (4 / 49) is a little below 4.
    config = tiny_config(head_dim=49, qk_rope_head_dim=4)
    assert int(49 * (4 / 49)) == 3, "the fixture must be a case where it matters"
    assert int(49 * config_to_dict(config, "huggingface", "float32")["partial_rotary_factor"]) == 4


def test_weights_are_as_readable_as_the_config(tmp_path):
    """save_file makes files that only their owner can read; a shared checkpoint must not be like that."""
    from support import random_model

    out = export_model(random_model(), tmp_path / "out", to="official")
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
