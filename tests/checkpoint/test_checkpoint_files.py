"""Damaged files, headers and indexes: each fault is found from the headers, before a model is built, and named."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_helpers import WQ_A, edit_index, read_tensors, refused, shard_of, write_tensors
from safetensors.torch import save_file

from polytempo.checkpoint.headers import INDEX_NAME, SINGLE_NAME
from polytempo.checkpoint.load import load_model
from polytempo.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("no_model")


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
