"""What `inspect_checkpoint` says of whole and of damaged checkpoints."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_helpers import RAW_CONFIG, export_tiny, random_model, read_tensors, tiny_config, write_tensors

from polytempo.cache.layout import StateShape
from polytempo.cache.store import RowStore
from polytempo.checkpoint.checks import list_names
from polytempo.checkpoint.inspect import inspect_checkpoint
from polytempo.engine_config import EngineConfig
from polytempo.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.usefixtures("no_model")


def test_whole_checkpoint(tmp_path):
    found = inspect_checkpoint(export_tiny(tmp_path / "a"), rows=3, context=200)
    for dtype in (torch.float32, torch.bfloat16):
        state = random_model(dtype=dtype).state_dict().values()
        held = sum(value.numel() * value.itemsize for value in state)
        assert found.weight_bytes[str(dtype).removeprefix("torch.")] == held
    assert [(layer.name, layer.ratio, layer.routing) for layer in found.layers] == [
        ("0", 0, "by token id"), ("1", 4, "by score"), ("2", 128, "by score"), ("3", 4, "by score"),
        ("mtp.0", 0, "by score"),
    ]  # fmt: skip
    text = str(found)
    for part in (
        "official",
        f"{found.report.num_parameters:,}",
        "compressed sparse",
        "1 3",
        "mtp.0",
        "yes",
        "I8",
    ):
        assert part in text, text
    assert "3 row(s) of 200 positions" in text and "problem" not in text and "missing" not in text
    values = json.loads(json.dumps(found.to_dict()))
    assert values["report"]["can_speculate"] is True and values["layers"][2]["ratio"] == 128


def test_damaged_checkpoint_is_described_not_raised(tmp_path):
    folder = export_tiny(tmp_path / "a")
    tensors = read_tensors(folder)
    del tensors["mtp.0.hnorm.weight"]
    tensors["layers.7.made_up"] = torch.zeros(2)
    write_tensors(folder, tensors)
    found = inspect_checkpoint(folder)
    assert found.report.missing == ("mtp.0.hnorm.weight",)
    assert found.report.unexpected == ("layers.7.made_up",)
    assert not found.report.can_speculate and found.context == 512
    text = str(found)
    for part in (
        "missing       mtp.0.hnorm.weight",
        "unexpected    layers.7.made_up",
        "problem",
        "speculation   no",
    ):
        assert part in text, text


def test_without_mtp(tmp_path):
    folder = export_tiny(tmp_path / "a")
    write_tensors(folder, {n: v for n, v in read_tensors(folder).items() if not n.startswith("mtp.")})
    found = inspect_checkpoint(folder)
    assert len(found.layers) == 4 and not found.report.can_speculate and not found.report.problems
    assert "note" in str(found) and "mtp.0.e_proj.weight" in str(found)


@pytest.mark.parametrize("rows, context", [(3, 200), (1, 512), (2, 7)])
def test_state_is_what_a_store_allocates(tmp_path, rows, context):
    found = inspect_checkpoint(export_tiny(tmp_path / "a"), rows=rows, context=context)
    engine = EngineConfig(max_rows=rows, max_model_len=context, max_chunk=min(256, context))
    for dtype in (torch.float32, torch.bfloat16):
        store = RowStore.allocate(StateShape.build(tiny_config(), engine), rows, dtype)
        for slot in range(rows):
            store.pool.reserve(slot, context)
        store.fit()
        null_blocks = sum(pool.block_bytes for pool in store.pool.ratios.values())
        assert found.state_bytes[str(dtype).removeprefix("torch.")] == store.num_bytes - null_blocks


def test_more_rows_than_a_step_has_tokens(tmp_path):
    folder = export_tiny(tmp_path / "a")
    one, many = inspect_checkpoint(folder, rows=1), inspect_checkpoint(folder, rows=5000)
    assert many.state_bytes["float32"] == 5000 * one.state_bytes["float32"]


@pytest.mark.parametrize("options", [{"rows": 0}, {"context": 0}, {"context": 513}])
def test_impossible_questions(tmp_path, options):
    folder = export_tiny(tmp_path / "a")
    assert RAW_CONFIG["max_position_embeddings"] == 512
    with pytest.raises(ConfigError, match="512"):
        inspect_checkpoint(folder, **options)


def test_broken_files_are_raised(tmp_path):
    folder = export_tiny(tmp_path / "a")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        inspect_checkpoint(folder)


def test_long_lists_of_names_are_folded():
    names = [f"mtp.0.ffn.experts.{idx}.w1.weight" for idx in range(256)] + ["mtp.0.e_proj.weight"]
    assert list_names(names) == "mtp.0.ffn.experts.*.w1.weight (256), mtp.0.e_proj.weight"
    assert list_names(names[254:]) == ", ".join(names[254:])
    many = list_names([f"layers.{idx}.norm" for idx in range(150)])
    assert "layers.99.norm" in many and many.endswith("(50 more)")
