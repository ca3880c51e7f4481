"""Checkpoints: read and check, load, export, describe, and share with a live transformers model."""

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
