"""What an engine does not need to begin: memory of seats that nobody took, modules that nobody called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import polytempo
from polytempo.cache.store import CACHE_LINE, zero_pages

STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), (4, 0, 8)])
def test_zero_pages_are_zeros_of_the_asked_kind(dtype, shape):
    state = zero_pages(torch.empty(0, dtype=dtype), *shape)
    assert state.shape == shape and state.dtype == dtype and state.is_contiguous()
    assert torch.equal(state, torch.zeros(shape, dtype=dtype))
    state.fill_(1.0)
    assert state.sum() == state.numel()


def test_zero_pages_begin_a_cache_line():
    """The allocator leaves 16 bytes before what it maps: vectors of 64 would straddle two lines each."""
    kept = [zero_pages(torch.empty(0), count) for count in (1, 100, 1_000, 100_000, 1_000_000)]
    assert [state.data_ptr() % CACHE_LINE for state in kept] == [0] * len(kept)


@pytest.mark.skipif(not STATM.exists(), reason="needs Linux's /proc")
def test_seats_that_nobody_took_hold_no_memory():
    before = resident_bytes()
    state = zero_pages(torch.empty(0), 64, 2**20)
    untouched = resident_bytes() - before
    state[0].fill_(1.0)
    assert untouched < 2**22, "256 MiB of zeros were written"
    assert resident_bytes() - before >= 2**22, "the row that was written is there"


def test_loading_a_model_imports_neither_export_nor_the_server():
    code = "import sys, polytempo.llm; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(polytempo.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    loaded = set(done.stdout.split())
    assert "polytempo.checkpoint.load" in loaded
    unwanted = {"polytempo.checkpoint.export", "polytempo.checkpoint.inspect", "polytempo.server", "pydantic",
                "starlette", "matplotlib", "transformers", "llguidance"}  # fmt: skip
    assert not loaded & unwanted
