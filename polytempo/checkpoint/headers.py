"""The index and the headers of a checkpoint's safetensors files, read and checked without touching a weight.

Owns the file layer: which files there are, whether they are whole, which tensor lies where. Knows nothing of
models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polytempo.config import read_json
from polytempo.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_LENGTH_BYTES = 8
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        name: as written in the file.
        file: file name inside the checkpoint directory.
        dtype: safetensors' dtype code, such as "BF16" or "F8_E4M3".
        shape: as written in the file.
        start: first byte, counted from the end of the header.
        num_bytes: size of the data.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_entries(path: Path) -> list[TensorEntry]:
    """List the tensors of a checkpoint directory, in order of file and position.

    Args:
        path: directory with `model.safetensors`, or `model.safetensors.index.json` and its shards.

    Returns:
        One entry per tensor; names are unique.

    Raises:
        CheckpointError: a file is missing, truncated or malformed, the index and a file disagree, or a tensor
            is there twice; the message names file and tensor.
    """
    index_path, single_path = path / INDEX_NAME, path / SINGLE_NAME
    if not index_path.exists():
        if not single_path.exists():
            raise CheckpointError(_no_weights(path))
        return read_header(single_path)
    weight_map = _read_index(index_path)
    files = sorted(set(weight_map.values()))
    _require_files(path, files, weight_map)
    if single_path.exists() and SINGLE_NAME not in files:
        raise CheckpointError(
            f"{path}: holds both {SINGLE_NAME} and {INDEX_NAME}, which does not name it; remove the stale one"
        )
    entries = [entry for file in files for entry in read_header(path / file)]
    _compare_with_index(index_path, weight_map, entries)
    return entries


def read_header(path: Path) -> list[TensorEntry]:
    """List the tensors of one safetensors file by position, and check that the file is whole.

    Args:
        path: the file.

    Returns:
        One entry per tensor.

    Raises:
        CheckpointError: the file is truncated, has bytes left over, or its header is malformed.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES + header_bytes:
            raise CheckpointError(
                f"{path}: truncated or not a safetensors file: {size} bytes, its header alone needs "
                f"{_LENGTH_BYTES + header_bytes}"
            )
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw, object_pairs_hook=lambda pairs: _unique(pairs, path))
        if not isinstance(header, dict):
            raise TypeError("not an object")
        header.pop("__metadata__", None)
        entries = [_parse_entry(name, value, path.name) for name, value in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: malformed safetensors header ({error})") from None
    entries.sort(key=lambda entry: (entry.start, entry.num_bytes))
    _check_layout(path, entries, size - _LENGTH_BYTES - header_bytes)
    return entries


def _unique(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    # JSON keeps the last of two equal keys in silence; here that would be a tensor lost.
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise CheckpointError(f"{path}: names {name!r} twice")
        values[name] = value
    return values


def _parse_entry(name: str, value: dict[str, Any], file: str) -> TensorEntry:
    start, end = value["data_offsets"]
    shape = tuple(value["shape"])
    if not all(isinstance(number, int) and number >= 0 for number in (start, end, *shape)):
        raise ValueError(f"tensor {name!r} has offsets {value['data_offsets']} and shape {value['shape']}")
    item_bytes = _ITEM_BYTES.get(value["dtype"])
    if item_bytes is not None and end - start != math.prod(shape) * item_bytes:
        raise ValueError(
            f"tensor {name!r} of shape {shape} and dtype {value['dtype']} spans {end - start} bytes, "
            f"expected {math.prod(shape) * item_bytes}"
        )
    return TensorEntry(name, file, value["dtype"], shape, start, end - start)


def _check_layout(path: Path, entries: list[TensorEntry], data_bytes: int) -> None:
    """Tensors must follow each other without gap or overlap, from the header to the end of the file."""
    position = 0
    for entry in entries:
        if entry.start != position:
            raise CheckpointError(
                f"{path}: tensor {entry.name!r} starts at byte {entry.start} of the data, expected {position}"
            )
        position += entry.num_bytes
        if position > data_bytes:
            raise CheckpointError(
                f"{path}: truncated: tensor {entry.name!r} ends at byte {position} of the data, "
                f"the file has {data_bytes}"
            )
    if position != data_bytes:
        raise CheckpointError(f"{path}: {data_bytes - position} bytes follow the last tensor")


def _read_index(index_path: Path) -> dict[str, str]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: lacks a non-empty 'weight_map' object")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or file != Path(file).name:
            raise CheckpointError(
                f"{index_path}: tensor {name!r} is in {file!r}; expected the name of a file beside the index"
            )
    return weight_map


def _require_files(path: Path, files: Iterable[str], weight_map: dict[str, str]) -> None:
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        first = next(name for name, file in weight_map.items() if file == missing[0])
        raise CheckpointError(
            f"{path}: missing shard(s) {', '.join(missing)}, named by {INDEX_NAME} "
            f"(for tensor {first!r} and others); download or copy them"
        )


def _compare_with_index(index_path: Path, weight_map: dict[str, str], entries: list[TensorEntry]) -> None:
    file_of: dict[str, str] = {}
    for entry in entries:
        if entry.name in file_of:
            raise CheckpointError(
                f"{index_path.parent}: tensor {entry.name!r} is in two files, {file_of[entry.name]} and {entry.file}"
            )
        file_of[entry.name] = entry.file
    for name, file in weight_map.items():
        if name not in file_of:
            raise CheckpointError(f"{index_path}: says that {file} holds tensor {name!r}, but it does not")
        if file_of[name] != file:
            raise CheckpointError(f"{index_path}: says that {file} holds tensor {name!r}, but it is in {file_of[name]}")
    for name, file in file_of.items():
        if name not in weight_map:
            raise CheckpointError(f"{index_path}: does not list tensor {name!r}, which is in {file}")


def _no_weights(path: Path) -> str:
    others = sorted(file.name for file in path.glob("*.safetensors"))
    hint = f"; the index that ties {', '.join(others[:4])} together is missing" if others else ""
    return f"{path}: holds neither {SINGLE_NAME} nor {INDEX_NAME}{hint}"
