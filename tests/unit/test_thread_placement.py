"""Threads that get in each other's way are named when an engine starts."""

import warnings

import pytest
import torch

from polytempo import thread_placement
from polytempo.llm import LLM
from polytempo.thread_placement import thread_faults, usable_processors, warn_about_threads


@pytest.fixture(autouse=True)
def fresh():
    before = torch.get_num_threads()
    warn_about_threads.cache_clear()
    yield
    torch.set_num_threads(before)
    warn_about_threads.cache_clear()


def runtimes(*names):
    return lambda: [{"user_api": "openmp", "filepath": name} for name in names] + [
        {"user_api": "blas", "filepath": "libblas.so"}
    ]


def test_as_many_threads_as_processors_is_fine(monkeypatch):
    monkeypatch.setattr(thread_placement, "threadpool_info", runtimes("libgomp.so"))
    torch.set_num_threads(usable_processors())
    assert thread_faults() == []


def test_more_threads_than_processors(monkeypatch):
    monkeypatch.setattr(thread_placement, "usable_processors", lambda: 2)
    torch.set_num_threads(3)
    (fault,) = thread_faults()
    assert "3 threads" in fault and "2 processors" in fault and "OMP_NUM_THREADS=2" in fault


def test_two_openmp_runtimes(monkeypatch):
    monkeypatch.setattr(thread_placement, "threadpool_info", runtimes("libgomp.so", "libiomp5.so", "libgomp.so"))
    torch.set_num_threads(1)
    (fault,) = thread_faults()
    assert fault.startswith("2 OpenMP runtimes") and "libgomp.so, libiomp5.so" in fault


def test_an_engine_says_so_once(monkeypatch):
    monkeypatch.setattr(thread_placement, "usable_processors", lambda: 1)
    torch.set_num_threads(2)
    with pytest.warns(RuntimeWarning, match="may use 1 processors"):
        llm = LLM(max_rows=1, max_model_len=32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM.from_model(llm.model, max_rows=1, max_model_len=32)
