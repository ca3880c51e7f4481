"""Matches the tensors that a checkpoint has against those that its config asks for, before a weight is read.

Owns the decisions: what is missing, unexpected or wrongly stored, which blocks' scales go with which weights,
whether the MTP block is there. Reads headers only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polytempo.checkpoint.checks import LoadItem, check_item, expert_dtype, list_names
from polytempo.checkpoint.headers import TensorEntry, read_entries
from polytempo.checkpoint.names import (
    FORMS,
    Storage,
    expected_weights,
    fused_experts_block,
    is_mtp_copy,
    official_name,
)
from polytempo.checkpoint.quant import FP8_BLOCK
from polytempo.config import ModelConfig, read_json
from polytempo.errors import CheckpointError

_EXPERT_DTYPES = ("fp4", "fp8")


@dataclass(frozen=True)
class CheckpointReport:
    """What a checkpoint holds.

    Attributes:
        path: its directory.
        form: "official" or "huggingface", by the spelling of its names.
        layer_ratios: compress ratio per decoder layer.
        num_hash_layers: leading layers that route by token id.
        num_parameters: numbers in the model that will be loaded, routing tables not counted.
        num_mtp_parameters: those of them that belong to the MTP block.
        bytes_by_dtype: bytes on disk by safetensors dtype code, all tensors.
        files: shard file names, sorted.
        found: official names of the tensors that will be loaded, scales not counted.
        missing: official names of tensors that the config asks for and no file holds.
        unexpected: names, as in the files, that the model has no use for.
        ignored: names, as in the files, that are left out for a reason given in `notes`.
        notes: what was decided on the user's behalf.
        problems: why the checkpoint cannot be loaded; empty if it can.
        can_speculate: whether the MTP block is complete.
    """

    path: str
    form: str
    layer_ratios: tuple[int, ...]
    num_hash_layers: int
    num_parameters: int
    num_mtp_parameters: int
    bytes_by_dtype: dict[str, int]
    files: tuple[str, ...]
    found: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    can_speculate: bool


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers were read.

    Attributes:
        path: its directory.
        config: of the model to build; without the MTP block if its tensors are absent.
        items: tensors to load, in order of file and position.
        report: see `CheckpointReport`.
    """

    path: Path
    config: ModelConfig
    items: tuple[LoadItem, ...]
    report: CheckpointReport


def read_checkpoint(path: str | Path, require_mtp: bool = False) -> Checkpoint:
    """Read config, index and headers, and insist that every weight can be loaded.

    Args:
        path: checkpoint directory.
        require_mtp: fail if the checkpoint cannot speculate.

    Returns:
        The checkpoint; its report has no problems.

    Raises:
        CheckpointError: files or tensors are missing, unknown, malformed or contradict the config; the
            message names them.
        ConfigError: config.json is not a model that can be built.
    """
    checkpoint = survey_checkpoint(path, require_mtp)
    problems = checkpoint.report.problems
    if problems:
        rest = f"\n... and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(f"{path}: cannot be loaded:\n" + "\n".join(problems[:8]) + rest)
    return checkpoint


def survey_checkpoint(path: str | Path, require_mtp: bool = False) -> Checkpoint:
    """As `read_checkpoint`, but report tensor problems instead of raising.

    Args:
        path: checkpoint directory.
        require_mtp: count a missing MTP block as a problem.

    Returns:
        The checkpoint; see `report.problems`.

    Raises:
        CheckpointError: a file is missing or malformed.
        ConfigError: config.json is not a model that can be built.
    """
    path = Path(path)
    raw = read_json(path / "config.json")
    config = ModelConfig.from_dict(raw)
    survey = _Survey(path, raw, config, read_entries(path))
    survey.settle_mtp(require_mtp)
    survey.match()
    survey.check_expert_dtype()
    return survey.result()


@dataclass
class _Survey:
    """The work of `survey_checkpoint`, step by step."""

    path: Path
    raw: Mapping[str, Any]
    config: ModelConfig
    entries: list[TensorEntry]
    unused: dict[str, TensorEntry] = field(default_factory=dict)
    items: list[LoadItem] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    ignored: list[TensorEntry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for entry in self.entries:
            name = official_name(entry.name)
            if name in self.unused:
                twin = self.unused[name]
                self.problems.append(f"{entry.file}: tensor {entry.name!r} is the same as {twin.name!r} in {twin.file}")
            self.unused[name] = entry

    def settle_mtp(self, require_mtp: bool) -> None:
        """Decide whether there is an MTP block, and take it out of the config if not."""
        copies = [name for name in self.unused if is_mtp_copy(name)]
        self._ignore(copies, "the MTP block shares the target's embedding and head, its copies are ignored")
        present = [name for name in self.unused if name.startswith("mtp.")]
        wanted = [spec.name for spec in expected_weights(self.config) if spec.is_mtp]
        if not wanted:
            count = self.raw.get("num_nextn_predict_layers")
            why = "config lacks 'num_nextn_predict_layers'"
            if count is not None:
                why = f"config field 'num_nextn_predict_layers' is {count!r}"
            self._ignore(present, f"{why}: the checkpoint's MTP tensors are ignored, no speculation")
            if require_mtp:
                self.problems.append(f"speculation needs an MTP block, but {why}")
        elif not present:
            self.missing += wanted
            if require_mtp:
                self.problems.append(f"speculation needs MTP tensors, all are missing: {list_names(wanted)}")
            else:
                self.notes.append("all MTP tensors are missing: the model loads, but cannot speculate")
            self.config = replace(self.config, num_nextn_predict_layers=0, mtp_compress_ratios=())

    def _ignore(self, names: list[str], note: str) -> None:
        if names:
            self.ignored += [self.unused.pop(name) for name in names]
            self.notes.append(f"{note} ({list_names(names)})")

    def match(self) -> None:
        """Pair every expected weight with its entry and its scale."""
        fused = frozenset(filter(None, map(fused_experts_block, self.unused)))
        absent = []
        for spec in expected_weights(self.config, fused):
            weight = self.unused.pop(spec.name, None)
            if weight is None:
                absent.append(spec.name)
                self.unused.pop(spec.scale_name, None)
                continue
            scale = self.unused.pop(spec.scale_name, None) if spec.storage.is_quantised else None
            item = LoadItem(spec, weight, scale)
            self.problems += check_item(item)
            self.items.append(item)
        if absent:
            self.missing += absent
            self.problems.append(f"missing tensor(s): {list_names(absent)}")
        by_file: dict[str, list[str]] = {}
        for entry in self.unused.values():
            by_file.setdefault(entry.file, []).append(entry.name)
        for file, names in by_file.items():
            self.problems.append(f"{file}: unexpected tensor(s), not in this config's model: {list_names(names)}")

    def check_expert_dtype(self) -> None:
        """The config's `expert_dtype` and the quantisation fields must agree with the tensors."""
        if any(item.scale for item in self.items):
            self._check_quantisation_config()
        declared = self.raw.get("expert_dtype") or self.config.expert_dtype
        experts = [item for item in self.items if item.spec.storage is Storage.EXPERT]
        stored = {expert_dtype(item): item for item in reversed(experts)}
        for dtype, item in stored.items():
            if dtype is None:
                if declared is not None:
                    self.notes.append(
                        f"config field 'expert_dtype' is {declared!r}, but {item.weight.name!r} and others "
                        f"are unquantised ({item.weight.dtype}); read as they are"
                    )
            elif declared is None:
                self.notes.append(f"config lacks 'expert_dtype'; the experts are {dtype} and are read as that")
            elif declared not in _EXPERT_DTYPES:
                self.problems.append(
                    f"{item.weight.file}: config field 'expert_dtype' is {declared!r}; known: "
                    f"{', '.join(_EXPERT_DTYPES)} (tensor {item.weight.name!r} looks like {dtype})"
                )
            elif declared != dtype:
                self.problems.append(
                    f"{item.weight.file}: config field 'expert_dtype' is {declared!r}, but tensor "
                    f"{item.weight.name!r} is {item.weight.dtype}, which is {dtype}"
                )

    def _check_quantisation_config(self) -> None:
        quantisation = self.raw.get("quantization_config") or {}
        known = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
        for name, value in known.items():
            if quantisation.get(name) not in (None, value):
                self.problems.append(
                    f"config field 'quantization_config.{name}' is {quantisation[name]!r}, supported: {value!r}"
                )

    def result(self) -> Checkpoint:
        """Put the findings together."""
        self.items.sort(key=lambda item: (item.weight.file, item.weight.start))
        num_mtp = _count_parameters(item for item in self.items if item.spec.is_mtp)
        by_dtype: Counter[str] = Counter()
        for entry in self.entries:
            by_dtype[entry.dtype] += entry.num_bytes
        report = CheckpointReport(
            path=str(self.path),
            form=FORMS[any(entry.name.startswith("model.") for entry in self.entries)],
            layer_ratios=self.config.compress_ratios,
            num_hash_layers=self.config.num_hash_layers,
            num_parameters=_count_parameters(self.items),
            num_mtp_parameters=num_mtp,
            bytes_by_dtype=dict(by_dtype),
            files=tuple(sorted({entry.file for entry in self.entries})),
            found=tuple(item.spec.name for item in self.items),
            missing=tuple(self.missing),
            unexpected=tuple(entry.name for entry in self.unused.values()),
            ignored=tuple(entry.name for entry in self.ignored),
            notes=tuple(self.notes),
            problems=tuple(self.problems),
            can_speculate=num_mtp > 0 and not any(name.startswith("mtp.") for name in self.missing),
        )
        return Checkpoint(self.path, self.config, tuple(self.items), report)


def _count_parameters(items: Any) -> int:
    return sum(math.prod(item.spec.shape) for item in items if item.spec.storage is not Storage.INT64)
