"""`weights="auto"`: packed where the kernels decode packed weights fast and something is quantised, else expanded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from checkpoint_helpers import export_tiny, random_model, read_tensors, write_tensors

from polytempo import LLM, SamplingParams
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
def test_expanded_where_they_do_not(folder, monkeypatch, library):
    monkeypatch.setattr(packed, "load_or_note", lambda: library)
    assert not is_packed(load_model(folder, weights="auto")[0])


@pytest.mark.usefixtures("prefers_packed")
def test_expanded_where_nothing_is_quantised_or_experts_are_stored_in_two_ways(tmp_path):
    plain = export_model(random_model(dtype=torch.bfloat16), tmp_path / "plain")
    mixed = export_tiny(tmp_path / "mixed")
    tensors, unquantised = read_tensors(mixed), read_tensors(export_tiny(tmp_path / "other", quantise=None))
    name = "layers.2.ffn.experts.3.w3"
    del tensors[f"{name}.scale"]
    tensors[f"{name}.weight"] = unquantised[f"{name}.weight"]
    write_tensors(mixed, tensors)
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


def test_tokens_and_logprobs_are_those_of_expanded_weights(folder):
    """On this machine, whatever it chooses."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    prompts = [[2 + (5 * row + place) % 40 for place in range(4 + row)] for row in range(3)]
    outputs = []
    for weights in ("expanded", "auto"):
        llm = LLM(folder, "bfloat16", weights=weights, max_rows=3, max_model_len=64, draft_len=2, progress=False)
        outputs.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(prompts, params, False)])
    assert outputs[0] == outputs[1] and len({tuple(ids) for ids, _ in outputs[0]}) > 1
