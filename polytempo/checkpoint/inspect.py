"""Describes a checkpoint and what it would need in memory, from its headers alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from polytempo.cache.layout import StateShape
from polytempo.checkpoint.checks import list_names
from polytempo.checkpoint.load import DTYPES
from polytempo.checkpoint.names import expected_weights
from polytempo.checkpoint.reader import CheckpointReport, survey_checkpoint
from polytempo.config import LAYER_TYPE_RATIO, ModelConfig
from polytempo.engine_config import EngineConfig
from polytempo.errors import ConfigError

_KIND = {ratio: name.replace("_", " ") for name, ratio in LAYER_TYPE_RATIO.items()}


@dataclass(frozen=True)
class LayerKind:
    """One layer: how it attends and routes."""

    name: str
    ratio: int
    attention: str
    routing: str


@dataclass(frozen=True)
class Inspection:
    """What `inspect_checkpoint` found.

    Attributes:
        report: what the files hold, and what is missing, unexpected or wrong.
        layers: one entry per decoder layer and MTP block.
        weight_bytes: memory for the weights, by dtype of the model.
        rows: rows that `state_bytes` is for.
        context: positions of each row.
        state_bytes: memory for the state of all rows, by dtype of the model.
    """

    report: CheckpointReport
    layers: tuple[LayerKind, ...]
    weight_bytes: dict[str, int]
    rows: int
    context: int
    state_bytes: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        report = self.report
        on_disk = ", ".join(f"{dtype} {_size(count)}" for dtype, count in sorted(report.bytes_by_dtype.items()))
        lines = [
            f"checkpoint    {report.path} ({report.form} names, {len(report.files)} file(s))",
            f"parameters    {report.num_parameters:,} (MTP block: {report.num_mtp_parameters:,})",
            f"on disk       {_size(sum(report.bytes_by_dtype.values()))}: {on_disk}",
            f"weights need  {_by_dtype(self.weight_bytes)}",
            f"state needs   {_by_dtype(self.state_bytes)} for {self.rows} row(s) of {self.context} positions",
            f"speculation   {'yes, 1 MTP block' if report.can_speculate else 'no'}",
            "layers",
            *_layer_table(self.layers),
        ]
        lists = {"missing": report.missing, "unexpected": report.unexpected, "ignored": report.ignored}
        lines += [f"{title:<14}{list_names(list(names))}" for title, names in lists.items() if names]
        lines += [f"note          {note}" for note in report.notes]
        lines += [f"problem       {problem}" for problem in report.problems]
        return "\n".join(lines)


def inspect_checkpoint(path: str | Path, rows: int = 1, context: int | None = None) -> Inspection:
    """Read a checkpoint's config and headers; no weight is touched.

    Args:
        path: checkpoint directory.
        rows: sequences to run at the same time.
        context: positions of each, at most the config's `max_position_embeddings`, which is the default.

    Returns:
        The findings; `str()` of it is for people. Tensor problems are listed in its report, not raised.

    Raises:
        CheckpointError: a file is missing or malformed.
        ConfigError: config.json is not a model that can be built, or `rows` or `context` is out of range.
    """
    checkpoint = survey_checkpoint(path)
    config = checkpoint.config
    context = config.max_position_embeddings if context is None else context
    if rows < 1 or not 1 <= context <= config.max_position_embeddings:
        raise ConfigError(
            f"rows is {rows} and context is {context}; rows must be at least 1 and context between 1 and "
            f"max_position_embeddings ({config.max_position_embeddings})"
        )
    return Inspection(
        report=checkpoint.report,
        layers=_layers(config),
        weight_bytes={name: weight_bytes(config, dtype) for name, dtype in DTYPES.items()},
        rows=rows,
        context=context,
        state_bytes={name: rows * state_bytes_per_row(config, rows, context, dtype) for name, dtype in DTYPES.items()},
    )


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Memory of a model's weights in bytes, the float32 ones among them included.

    Args:
        config: the model's shape.
        dtype: of the model.
    """
    return sum(math.prod(spec.shape) * spec.storage.memory_dtype(dtype).itemsize for spec in expected_weights(config))


def state_bytes_per_row(config: ModelConfig, rows: int, context: int, dtype: torch.dtype) -> int:
    """Memory that an engine of default limits reserves for the state of one row, in bytes.

    Args:
        config: the model's shape.
        rows: rows that run at the same time.
        context: most positions of each.
        dtype: of the cached numbers.
    """
    default = EngineConfig()
    engine = replace(
        default,
        max_rows=rows,
        max_model_len=context,
        max_chunk=min(default.max_chunk, context),
        max_step_tokens=max(default.max_step_tokens, rows),
    )
    return StateShape.build(config, engine).bytes_per_row(dtype.itemsize)


def _layers(config: ModelConfig) -> tuple[LayerKind, ...]:
    decoder = [
        LayerKind(f"{idx}", ratio, _KIND[ratio], "by token id" if config.is_hash_layer(idx) else "by score")
        for idx, ratio in enumerate(config.compress_ratios)
    ]
    mtp = [LayerKind(f"mtp.{idx}", r, _KIND[r], "by score") for idx, r in enumerate(config.mtp_compress_ratios)]
    return (*decoder, *mtp)


def _layer_table(layers: tuple[LayerKind, ...]) -> list[str]:
    """One line per kind of layer, with the layers that are of it."""
    kinds: dict[tuple[int, str, str], list[str]] = {}
    for layer in layers:
        kinds.setdefault((layer.ratio, layer.attention, layer.routing), []).append(layer.name)
    return [
        f"  ratio {ratio:<4} {attention:<30} experts {routing:<12} {len(names):>3}: {' '.join(names)}"
        for (ratio, attention, routing), names in kinds.items()
    ]


def _by_dtype(sizes: dict[str, int]) -> str:
    return ", ".join(f"{_size(count)} in {dtype}" for dtype, count in sizes.items())


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
