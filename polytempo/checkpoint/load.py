"""Fills a model from a checkpoint, one tensor at a time, so that memory stays near the size of the model."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from polytempo.checkpoint.headers import TensorEntry
from polytempo.checkpoint.names import Storage
from polytempo.checkpoint.packed import RawReader, build_packed, may_overflow, place, prefers_packed, require_packed
from polytempo.checkpoint.quant import FP8_BLOCK, dequantise_fp4, dequantise_fp8
from polytempo.checkpoint.reader import Checkpoint, CheckpointReport, LoadItem, read_checkpoint
from polytempo.config import ModelConfig
from polytempo.device import require_room, resolve_device
from polytempo.engine_config import WEIGHTS
from polytempo.errors import CheckpointError, ConfigError, unknown_option
from polytempo.model.deepseek_v4 import DeepseekV4

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NAN_SCALE = 0xFF
_BAND_ELEMENTS = 2**20


def load_model(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    require_mtp: bool = False,
    progress: bool = True,
    weights: str = "expanded",
) -> tuple[DeepseekV4, CheckpointReport]:
    """Load a model in either form of checkpoint.

    Everything that headers can tell is checked before any weight is allocated. Then the shards are read one
    after another: memory peaks at the model plus at most two shards.

    Args:
        path: checkpoint directory.
        dtype: of the weights: "float32", "bfloat16", a torch dtype, or "auto" for the config's own. Norms,
            hyper-connections, gates and sinks are float32 whatever this says.
        device: where the weights go; see `resolve_device`.
        require_mtp: fail if the checkpoint cannot speculate, with the list of what is missing.
        progress: show a bar on stderr if that is a terminal.
        weights: "expanded" turns quantised weights into `dtype`; "packed" leaves them as the checkpoint stores them,
            and they are expanded where they are used, to the same numbers. Memory then peaks at the bytes of the
            checkpoint plus the largest tensor that is not quantised. "auto" is "packed" where the C++ kernels can be
            built and decode packed weights as fast as they read others, and something is quantised; else "expanded".

    Returns:
        The model, in eval mode and without gradients, and what the checkpoint held.

    Raises:
        CheckpointError: see `read_checkpoint`; also a scale of NaN, or a weight that is not finite.
        ConfigError: config.json is not a model that can be built, `dtype` is not supported, the device cannot be used,
            has no room for the weights, or `weights` is "packed" and no weight is quantised.
    """
    if weights not in WEIGHTS:
        raise ConfigError("option 'weights': " + unknown_option("value", str(weights), WEIGHTS))
    device = resolve_device(device)
    checkpoint = read_checkpoint(path, require_mtp)
    model_dtype = resolve_dtype(dtype, checkpoint.config)
    is_packed = weights == "packed" or (weights == "auto" and prefers_packed(checkpoint, device))
    remedy = "use another device" if is_packed else "quantised ones take no more than their files with weights='packed'"
    require_room(device, _memory_of(checkpoint, model_dtype, is_packed), "weights", remedy)
    if is_packed:
        require_packed(checkpoint)
        model, fill = build_packed(checkpoint, model_dtype, device), _fill_packed
    else:
        model, fill = DeepseekV4(checkpoint.config, model_dtype, device), _fill
    model.requires_grad_(False).eval()
    total = sum(item.weight.num_bytes for item in checkpoint.items)
    hidden = not progress or not sys.stderr.isatty()
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=hidden) as bar:
        fill(model, checkpoint, bar)
    return model, checkpoint.report


def _memory_of(checkpoint: Checkpoint, dtype: torch.dtype, is_packed: bool) -> int:
    """Bytes of a checkpoint's weights in a model."""
    total = 0
    for item in checkpoint.items:
        if is_packed and item.scale is not None:
            total += item.weight.num_bytes + item.scale.num_bytes
        else:
            total += math.prod(item.spec.shape) * item.spec.storage.memory_dtype(dtype).itemsize
    return total


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig) -> torch.dtype:
    """The dtype that a `dtype` option of `load_model` means.

    Args:
        dtype: the option.
        config: asked if the option is "auto".

    Returns:
        torch.float32 or torch.bfloat16.

    Raises:
        ConfigError: anything else; the message says which are supported.
    """
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        name = config.dtype
        if name not in DTYPES:
            raise ConfigError(
                f"config field 'torch_dtype' is {name!r}, supported: {', '.join(DTYPES)}; pass one as `dtype`"
            )
    if name not in DTYPES:
        raise ConfigError(unknown_option("dtype", name, ["auto", *DTYPES]))
    return DTYPES[name]


def _fill(model: DeepseekV4, checkpoint: Checkpoint, bar: tqdm) -> None:
    state = model.state_dict()
    by_file: dict[str, list[LoadItem]] = defaultdict(list)
    for item in checkpoint.items:
        by_file[item.weight.file].append(item)
    for file, items in by_file.items():
        scales = _read_foreign_scales(checkpoint.path, file, items)
        with safe_open(checkpoint.path / file, framework="pt") as shard:
            for item in items:
                scale = None
                if item.scale is not None:
                    name = item.scale.name
                    scale = scales.pop(name) if name in scales else shard.get_tensor(name)
                target = state[item.spec.key][item.spec.where]
                _copy_checked(target, item, shard.get_tensor(item.weight.name), scale, model.config)
                bar.update(item.weight.num_bytes)


def _fill_packed(model: DeepseekV4, checkpoint: Checkpoint, bar: tqdm) -> None:
    state = model.state_dict()
    with RawReader(checkpoint.path) as reader:
        for item in checkpoint.items:
            if item.scale is None:
                target = state[item.spec.key][item.spec.where]
                _copy_checked(target, item, reader.read(item.weight), None, model.config)
            else:
                codes, scales = place(model, item)
                reader.read_bytes(item.weight, codes)
                reader.read_bytes(item.scale, scales)
                _check_packed(item, codes, scales)
            bar.update(item.weight.num_bytes)


def _check_packed(item: LoadItem, codes: Tensor, scales: Tensor) -> None:
    """Refuse what `_copy_checked` would."""
    _check_scale(item, scales)
    if may_overflow(item, codes, scales):
        codes = codes if item.is_fp4 else codes.view(torch.float8_e4m3fn)
        for _ in _values(item, codes, scales):
            pass


def _read_foreign_scales(path: Path, file: str, items: list[LoadItem]) -> dict[str, Tensor]:
    """Scales of this shard's weights that lie in other shards, each of which is opened once."""
    by_file: dict[str, list[TensorEntry]] = defaultdict(list)
    for item in items:
        if item.scale is not None and item.scale.file != file:
            by_file[item.scale.file].append(item.scale)
    scales = {}
    for other, entries in by_file.items():
        with safe_open(path / other, framework="pt") as shard:
            # Cloned, so that the other shard's pages are let go with its handle.
            scales.update({entry.name: shard.get_tensor(entry.name).clone() for entry in entries})
    return scales


def _copy_checked(target: Tensor, item: LoadItem, data: Tensor, scale: Tensor | None, config: ModelConfig) -> None:
    """Write one weight's values into its place in the model, and refuse those that cannot be right."""
    if item.spec.storage is Storage.INT64:
        lowest, highest = data.aminmax()
        if lowest < 0 or highest >= config.n_routed_experts:
            raise CheckpointError(
                f"{item.weight.file}: tensor {item.weight.name!r} names experts {int(lowest)} to {int(highest)}; "
                f"config field 'n_routed_experts' is {config.n_routed_experts}"
            )
        target.copy_(data)
        return
    if scale is not None:
        _check_scale(item, scale)
    for start, values in _values(item, data, scale):
        target[start : start + len(values)].copy_(values)


def _check_scale(item: LoadItem, scale: Tensor) -> None:
    if (scale.view(torch.uint8) == _NAN_SCALE).any():
        raise CheckpointError(
            f"{item.scale.file}: scale {item.scale.name!r} of tensor {item.weight.name!r} holds the byte "
            "0xFF, which is NaN"
        )


def _values(item: LoadItem, data: Tensor, scale: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """First row and values of one band of rows after another, all finite.

    By bands, since dequantised values take up to eight times the room of their codes.
    """
    band = max(_BAND_ELEMENTS // math.prod(item.spec.shape[1:]) // FP8_BLOCK, 1) * FP8_BLOCK
    for start in range(0, len(data), band):
        values = _decode(item, data[start : start + band], scale, start)
        lowest, highest = values.aminmax()
        if not (torch.isfinite(lowest) and torch.isfinite(highest)):
            raise CheckpointError(f"{item.weight.file}: tensor {item.weight.name!r} holds a value that is not finite")
        yield start, values


def _decode(item: LoadItem, codes: Tensor, scale: Tensor | None, start: int) -> Tensor:
    """Values of the rows that begin at `start`, a multiple of the fp8 block."""
    if scale is None:
        return codes
    if item.is_fp4:
        return dequantise_fp4(codes, scale[start : start + len(codes)])
    first = start // FP8_BLOCK
    return dequantise_fp8(codes, scale[first : first - (-len(codes) // FP8_BLOCK)])
