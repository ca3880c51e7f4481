"""Who takes the Triton kernels, and what is said where there are none."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from support import ENGINE, TINY, random_model
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from polytempo import LLM
from polytempo.errors import ConfigError
from polytempo.gpu import available, grid
from polytempo.model import moe, ops


@pytest.fixture
def fresh():
    """Triton is looked for anew, before and after."""
    caches = available.missing_triton, available.has_triton_or_note
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_triton_is_refused_on_the_cpu():
    model = random_model()
    with pytest.raises(ConfigError, match="'triton', but the model is on cpu.*use 'auto' or 'torch'"):
        model.with_kernels("triton")
    with pytest.raises(ConfigError, match="Triton kernels run on a GPU"):
        LLM.from_model(model, kernels="triton")


def test_triton_is_refused_where_it_is_missing(monkeypatch, fresh):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(ops, "TRITON_DEVICES", {"cpu"})
    with pytest.raises(ConfigError, match="'triton', but Triton cannot be imported"):
        random_model().with_kernels("triton")


def test_triton_that_cannot_start_kernels_is_refused(monkeypatch, fresh):
    """There is no driver here, as there is no C compiler elsewhere: Triton is imported all the same."""
    pytest.importorskip("triton", reason="Triton is not installed (it has wheels for Linux alone)")
    if torch.cuda.is_available():
        pytest.skip("Triton can start kernels here")
    assert available.missing_triton() is None, "the interpreter needs no driver"
    available.missing_triton.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ops, "TRITON_DEVICES", {"cpu"})
    with pytest.raises(ConfigError, match="'triton', but Triton cannot start kernels"):
        random_model().with_kernels("triton")


def test_without_triton_torch_is_taken_with_one_note(monkeypatch, fresh):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(ops, "TRITON_DEVICES", {"cpu"})
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    with torch.no_grad():
        with pytest.warns(RuntimeWarning, match="torch is used on the GPU.*depend on its neighbours.*polytempo.gpu"):
            first = ops.linear(x, weight)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(ops.linear(x, weight), first)
    torch.testing.assert_close(first, x @ weight.t())


def test_who_chose_torch_gets_no_note(monkeypatch, fresh):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(ops, "TRITON_DEVICES", {"cpu"})
    streams = torch.randn(2, TINY.hc_mult, TINY.hidden_size)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert random_model().with_kernels("torch").logits(streams).shape == (2, TINY.vocab_size)


def test_a_model_that_chose_triton_has_no_cpu_kernels(monkeypatch):
    monkeypatch.setattr(available, "missing_triton", lambda: None)
    monkeypatch.setattr(ops, "missing_triton", lambda: None)
    monkeypatch.setattr(ops, "TRITON_DEVICES", {"cpu"})
    chosen = random_model().with_kernels("triton")
    assert chosen.kernels == "triton" and chosen.native is None and ENGINE.kernels == "auto"


def test_importing_the_package_imports_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import polytempo.model.forward, polytempo.llm, polytempo.cli\n"
        "assert not [name for name in sys.modules if name.startswith('triton.')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


CONFIG = SimpleNamespace(n_routed_experts=5, moe_intermediate_size=12, hidden_size=16, swiglu_limit=1.0)


def fake_experts(monkeypatch, kernels: str) -> torch.Tensor:
    """Experts on a GPU that is not there; kernels are not launched."""
    pytest.importorskip("triton", reason="Triton is not installed (it has wheels for Linux alone)")
    monkeypatch.setattr(grid, "launch", lambda *arguments, **constants: None)
    run = ops.by_own_kernels(lambda model, *arguments: moe.Experts(CONFIG, torch.bfloat16, "cuda")(*arguments))
    with torch.no_grad(), FakeTensorMode():
        x = torch.empty(7, 16, dtype=torch.bfloat16, device="cuda")
        expert_ids = torch.empty(7, 2, dtype=torch.int64, device="cuda")
        return run(SimpleNamespace(kernels=kernels), x, expert_ids, torch.empty(7, 2, device="cuda"))


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_experts_on_a_gpu_do_not_wait_for_it(monkeypatch, kernels):
    out = fake_experts(monkeypatch, kernels)
    assert out.shape == (7, 16) and out.device.type == "cuda" and out.dtype == torch.float32


def test_experts_in_torch_wait_for_the_gpu(monkeypatch):
    """What the test above would notice: sizes that are counted on the GPU."""
    with pytest.raises(DynamicOutputShapeException):
        fake_experts(monkeypatch, "torch")
