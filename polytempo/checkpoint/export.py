"""Writes a model as a checkpoint directory, in the official or the Hugging Face form."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from polytempo.checkpoint.config_out import config_to_dict
from polytempo.checkpoint.headers import INDEX_NAME, SINGLE_NAME
from polytempo.checkpoint.names import Storage, WeightSpec, expected_weights, huggingface_name
from polytempo.checkpoint.quant import (
    FP4_RUN,
    fp4_scale_shape,
    fp8_scale_shape,
    quantise_fp4,
    quantise_fp8,
)
from polytempo.errors import CheckpointError, ConfigError
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.packed import Packed

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip
DEFAULT_SHARD_BYTES = 4 * 2**30


def export_model(
    model: DeepseekV4,
    out_dir: str | Path,
    to: str = "official",
    quantise: str | None = None,
    tokenizer_dir: str | Path | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Write config, weights and tokenizer files.

    Without quantisation every tensor is written in its dtype in memory, so that loading gives the same bits.
    With it, matrices are rounded as `polytempo.checkpoint.quant` says, and embedding, head, norms, gates and
    compressor projections to bfloat16; loading and writing the result once more changes nothing.

    Args:
        model: what to write.
        out_dir: directory to make; its content appears all at once, when everything is written.
        to: "official" or "huggingface".
        quantise: official form only: "fp8-fp4" (routed experts fp4, other matrices fp8), "fp8" (all fp8), or
            None or "none".
        tokenizer_dir: directory whose tokenizer files are copied.
        max_shard_bytes: a new shard is begun rather than exceed this, in bytes.
        overwrite: allow a non-empty `out_dir`; of its files only those of the same names and old weights go.

    Returns:
        `out_dir`.

    Raises:
        CheckpointError: `out_dir` is not empty, the tokenizer is missing, or a weight cannot be quantised.
        ConfigError: an option is unknown or does not fit the form or the model's shape, or the model's weights are
            packed.
    """
    if any(isinstance(module, Packed) for module in model.modules()):
        raise ConfigError("a model with packed weights cannot be exported; load it with weights='expanded'")
    out_dir, quantise = Path(out_dir).absolute(), quantise or "none"
    values = config_to_dict(model.config, to, str(model.dtype).removeprefix("torch."), quantise)
    if quantise == "fp8-fp4":
        _require_fp4_shapes(model)
    if out_dir.exists() and not out_dir.is_dir():
        raise CheckpointError(f"{out_dir}: is a file; choose a directory")
    if out_dir.exists() and any(out_dir.iterdir()) and not overwrite:
        raise CheckpointError(f"{out_dir}: is not empty; choose another directory or pass overwrite=True")
    tokenizer_files = _tokenizer_files(tokenizer_dir)
    partial = out_dir.with_name(f".{out_dir.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        (partial / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        _write_weights(model, partial, to, quantise, max_shard_bytes)
        for file in tokenizer_files:
            shutil.copyfile(file, partial / file.name)
        _move_into_place(partial, out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out_dir


@dataclass(frozen=True)
class _Output:
    """One weight to write, with its scale if it is quantised, and its size in the file."""

    spec: WeightSpec
    method: str
    num_bytes: int


def _write_weights(model: DeepseekV4, folder: Path, to: str, quantise: str, max_shard_bytes: int) -> None:
    outputs = [_plan(spec, quantise, model.dtype) for spec in expected_weights(model.config)]
    shards = _split(outputs, max_shard_bytes)
    state = model.state_dict()
    rename = huggingface_name if to == "huggingface" else str
    weight_map: dict[str, str] = {}
    for shard_idx, shard in enumerate(shards):
        file = SINGLE_NAME
        if len(shards) > 1:
            file = f"model-{shard_idx + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {rename(name): value for output in shard for name, value in _encode(output, state).items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        # save_file leaves it readable by its owner alone, whatever the umask says.
        shutil.copymode(folder / "config.json", folder / file)
        weight_map.update(dict.fromkeys(tensors, file))
    if len(shards) > 1:
        total = sum(output.num_bytes for output in outputs)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _plan(spec: WeightSpec, quantise: str, model_dtype: torch.dtype) -> _Output:
    """Choose how to write one weight: "fp8", "fp4", "bfloat16" or "keep"."""
    numel = torch.Size(spec.shape).numel()
    keep_bytes = numel * spec.storage.memory_dtype(model_dtype).itemsize
    if quantise == "none":
        return _Output(spec, "keep", keep_bytes)
    if spec.storage is Storage.EXPERT and quantise == "fp8-fp4":
        return _Output(spec, "fp4", numel // 2 + torch.Size(fp4_scale_shape(spec.shape)).numel())
    if spec.storage.is_quantised:
        return _Output(spec, "fp8", numel + torch.Size(fp8_scale_shape(spec.shape)).numel())
    if spec.storage in (Storage.BF16, Storage.BF16_WIDENED):
        return _Output(spec, "bfloat16", numel * 2)
    return _Output(spec, "keep", keep_bytes)


def _split(outputs: list[_Output], max_shard_bytes: int) -> list[list[_Output]]:
    """Cut the outputs, in order, into shards of at most `max_shard_bytes`, or of one tensor."""
    shards: list[list[_Output]] = []
    room = 0
    for output in outputs:
        if not shards or output.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(output)
        room -= output.num_bytes
    return shards


def _encode(output: _Output, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors to write for one weight, by official name."""
    spec, method = output.spec, output.method
    value = state[spec.key][spec.where]
    if method in ("fp4", "fp8"):
        quantise = quantise_fp4 if method == "fp4" else quantise_fp8
        try:
            codes, scale = quantise(value)
        except ValueError as error:
            raise CheckpointError(f"tensor {spec.name!r} cannot be written as {method}: {error}") from None
        return {spec.name: codes.cpu().contiguous(), spec.scale_name: scale.cpu().contiguous()}
    dtype = torch.bfloat16 if method == "bfloat16" else value.dtype
    # Copied, since save_file refuses tensors that share a storage, as the experts of a stack do.
    return {spec.name: value.to(device="cpu", dtype=dtype, copy=True).contiguous()}


def _require_fp4_shapes(model: DeepseekV4) -> None:
    for name in ("hidden_size", "moe_intermediate_size"):
        width = getattr(model.config, name)
        if width % FP4_RUN:
            raise ConfigError(
                f"config field {name!r} is {width}; fp4 experts need a multiple of {FP4_RUN} "
                "(quantise='fp8' has no such limit)"
            )


def _tokenizer_files(tokenizer_dir: str | Path | None) -> list[Path]:
    if tokenizer_dir is None:
        return []
    folder = Path(tokenizer_dir)
    if not (folder / TOKENIZER_FILES[0]).is_file():
        raise CheckpointError(f"{folder}: holds no {TOKENIZER_FILES[0]}; no tokenizer to copy")
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def _move_into_place(partial: Path, out_dir: Path) -> None:
    out_dir.mkdir(exist_ok=True)
    for stale in [*out_dir.glob("model*.safetensors"), out_dir / INDEX_NAME]:
        stale.unlink(missing_ok=True)
    for file in partial.iterdir():
        os.replace(file, out_dir / file.name)
