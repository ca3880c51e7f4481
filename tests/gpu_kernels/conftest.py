"""The kernels run on the GPU where there is one, and else in Triton's interpreter on CPU tensors."""

import pytest
import torch


@pytest.fixture(autouse=True)
def triton_everywhere(monkeypatch):
    """Triton's forms for CPU tensors too, without gradients."""
    from triton_support import HAS_GPU, make_interpreter_exact, make_interpreter_faster

    from polytempo.model import ops

    monkeypatch.setattr(ops, "TRITON_DEVICES", {"cuda", "cpu"})
    if not HAS_GPU:
        make_interpreter_exact(monkeypatch)
        make_interpreter_faster(monkeypatch)
    with torch.no_grad():
        yield
