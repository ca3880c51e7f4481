"""Checkpoints: read and check, load, export, describe, and share with a live transformers model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polytempo.checkpoint.export import export_model
    from polytempo.checkpoint.inspect import Inspection, inspect_checkpoint
    from polytempo.checkpoint.live import share_transformers_model
    from polytempo.checkpoint.load import load_model
    from polytempo.checkpoint.reader import CheckpointReport, read_checkpoint

__all__ = [
    "CheckpointReport",
    "Inspection",
    "export_model",
    "inspect_checkpoint",
    "load_model",
    "read_checkpoint",
    "share_transformers_model",
]

# Loaded on first use: who only loads a model does not wait for export and inspect.
_HOMES = {
    "CheckpointReport": "reader",
    "Inspection": "inspect",
    "export_model": "export",
    "inspect_checkpoint": "inspect",
    "load_model": "load",
    "read_checkpoint": "reader",
    "share_transformers_model": "live",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"polytempo.checkpoint.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
