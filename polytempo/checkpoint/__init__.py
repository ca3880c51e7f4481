"""Checkpoints: read and check, load, export, describe, and share with a live transformers model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polytempo.lazy import lazy_attributes

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
__getattr__ = lazy_attributes(__name__, {
    "CheckpointReport": "polytempo.checkpoint.reader",
    "Inspection": "polytempo.checkpoint.inspect",
    "export_model": "polytempo.checkpoint.export",
    "inspect_checkpoint": "polytempo.checkpoint.inspect",
    "load_model": "polytempo.checkpoint.load",
    "read_checkpoint": "polytempo.checkpoint.reader",
    "share_transformers_model": "polytempo.checkpoint.live",
})
