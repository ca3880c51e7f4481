"""Every test of this folder takes a `device`: the CPU in `make test`, a CUDA device in `make test-gpu`.

So a test that has never met a GPU is at least known to pass where there is none.
"""

import copy
import functools

import pytest
import torch
from speculation_support import model_of

from polytempo.model.deepseek_v4 import DeepseekV4


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    """Where the test runs."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(autouse=True)
def kernels(request, monkeypatch) -> None:
    """On the CPU the torch path, since that is what a device runs too; commands run as a user's do."""
    if "commands" not in request.path.name:
        monkeypatch.setattr(DeepseekV4, "native", None)


@functools.cache
def _model_on(device: torch.device, *options) -> DeepseekV4:
    return copy.deepcopy(model_of(*options)).to(device)


@pytest.fixture
def model_on(device):
    """(seed, dtype, config) -> that random model on the device, made once."""
    return functools.partial(_model_on, device)
