"""Fixtures of the checkpoint tests."""

from __future__ import annotations

import pytest

from polytempo.checkpoint import load


@pytest.fixture
def no_model(monkeypatch):
    """Fail if a model is built: faults must be found before any weight is allocated."""

    def refuse(*args, **kwargs):
        raise AssertionError("a model was built before the checkpoint was checked")

    monkeypatch.setattr(load, "DeepseekV4", refuse)
