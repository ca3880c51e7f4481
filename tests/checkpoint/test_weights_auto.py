"""`weights="auto"`: packed where the kernels decode packed weights fast and something is quantised, else expanded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from checkpoint_helpers import export_tiny, random_model, store_one_expert_unquantised

from polytempo import LLM
from polytempo.bench.suite import Suite, _load
from polytempo.checkpoint import packed
from polytempo.checkpoint.export import export_model
from polytempo.checkpoint.load import load_model
from polytempo.model.packed import PackedLinear


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return export_tiny(tmp_path_factory.mktemp("auto") / "model")


@pytest.fixture
def prefers_packed(monkeypatch):
    """A machine whose kernels decode packed weights fast."""
    monkeypatch.setattr(packed, "load_or_note", lambda: SimpleNamespace(pt_prefers_packed=lambda: 1))


def is_packed(model) -> bool:
    return isinstance(model.layers[0].attn.wq_a, PackedLinear)


@pytest.mark.usefixtures("prefers_packed")
def test_packed_where_the_kernels_are_fast(folder):
    assert is_packed(load_model(folder, weights="auto")[0])
    assert is_packed(LLM(folder, max_model_len=64, progress=False).model)


@pytest.mark.parametrize("library", [None, SimpleNamespace(pt_prefers_packed=lambda: 0)], ids=["no kernels", "slow"])
def test_expanded_where_there_are_no_kernels_or_slow_ones(folder, monkeypatch, library):
    monkeypatch.setattr(packed, "load_or_note", lambda: library)
    assert not is_packed(load_model(folder, weights="auto")[0])


@pytest.mark.usefixtures("prefers_packed")
def test_expanded_where_nothing_is_quantised_or_experts_are_stored_in_two_ways(tmp_path):
    plain = export_model(random_model(dtype=torch.bfloat16), tmp_path / "plain")
    mixed = export_tiny(tmp_path / "mixed")
    store_one_expert_unquantised(mixed, tmp_path / "other")
    assert not is_packed(load_model(plain, weights="auto")[0])
    assert not is_packed(load_model(mixed, weights="auto")[0])


@pytest.mark.usefixtures("prefers_packed")
@pytest.mark.parametrize("option", [{"kernels": "torch"}, {"kv_layout": "left_aligned"}], ids=str)
def test_expanded_where_the_engine_runs_in_torch(folder, option):
    assert not is_packed(LLM(folder, max_model_len=64, progress=False, **option).model)


@pytest.mark.usefixtures("prefers_packed")
def test_bench_with_a_mode_in_torch_expands(folder):
    assert is_packed(_load(Suite(folder), "auto").model)
    for suite in (Suite(folder, kernels="torch"), Suite(folder, kv_layouts=("ring", "left_aligned"))):
        assert not is_packed(_load(suite, "auto").model)
