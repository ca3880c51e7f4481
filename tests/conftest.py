"""Shared settings: one torch thread, and which kernels the tests of the model meet.

The models of the tests are so small that a second thread costs more than it brings, and when anything else runs on
the same cores two OpenMP teams slow each other down tenfold. `make invariance` probes other thread counts.

tests/model holds the torch twin to its word, and its mutants are in the twin's files; `--kernels auto` runs the same
tests through the C++ kernels, but for those marked `twin`. All other tests run what a user runs.
"""

import os
from pathlib import Path

import pytest
import torch

from polytempo.model.deepseek_v4 import DeepseekV4

torch.set_num_threads(1)
# Triton reads this once, when it is imported: without a GPU its kernels run in its interpreter (tests/gpu_kernels).
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser):
    parser.addoption("--kernels", choices=("auto", "torch"), help="what runs the cached forward")


@pytest.fixture(autouse=True)
def kernels(request, monkeypatch):
    """Which path this test takes."""
    is_model = Path(request.fspath).parent.name == "model"
    choice = request.config.getoption("--kernels") or ("torch" if is_model else "auto")
    if request.node.get_closest_marker("twin"):
        choice = "torch"
    if choice == "torch":
        monkeypatch.setattr(DeepseekV4, "native", None)
    return choice
