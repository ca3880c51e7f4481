"""Fixtures of the checkpoint tests."""

from __future__ import annotations

import pytest
from checkpoint_helpers import export_tiny

from polytempo.checkpoint import load


@pytest.fixture
def no_model(monkeypatch):
    """Fail if a model is built: faults must be found before any weight is allocated."""

    def refuse(*args, **kwargs):
        raise AssertionError("a model was built before the checkpoint was checked")

    monkeypatch.setattr(load, "DeepseekV4", refuse)


@pytest.fixture
def single(tmp_path):
    """A quantised official checkpoint in one file."""
    return export_tiny(tmp_path / "single")


@pytest.fixture
def sharded(tmp_path):
    """The same in several shards."""
    folder = export_tiny(tmp_path / "sharded", max_shard_bytes=60_000)
    assert len(list(folder.glob("*.safetensors"))) >= 4
    return folder
