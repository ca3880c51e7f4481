"""Steps through the Triton kernels: what the host does around their starts, on tensors that are only shapes.

No kernel runs: its start is skipped. This shows that all it is given lies on the device, and that nothing is read back
in a layer, the routed experts included.
"""

from __future__ import annotations

import pytest
import torch
from device_waits import check, fake_llm, params, prompt_of, waits_by_step
from fake_cuda import DEVICE, fake_cuda

from polytempo.gpu import grid
from polytempo.model import ops

KERNELS = {"product_kernel", "rms_norm_kernel", "gate_up_kernel", "down_kernel"}


@pytest.mark.parametrize("dtype, kernels", [
    (torch.float32, KERNELS), (torch.bfloat16, {*KERNELS, "attend_kernel"}),
], ids=["float32", "bfloat16"])  # fmt: skip
def test_a_step_through_the_kernels_reads_only_its_tokens(monkeypatch, dtype, kernels):
    pytest.importorskip("triton")
    started = []

    def skip(kernel, num_programs, first, *arguments, **constants):
        tensors = [one for one in (first, *arguments) if isinstance(one, torch.Tensor)]
        assert all(tensor.device == DEVICE for tensor in tensors), kernel.__name__
        started.append(kernel.__name__)

    monkeypatch.setattr(grid, "launch", skip)
    monkeypatch.setattr(ops, "has_triton_or_note", lambda: True)
    with fake_cuda():
        llm = fake_llm(dtype, draft_len=2, max_chunk=32)
        rows = [llm.rows_of(prompt_of(length), params(max_tokens=5))[0] for length in (35, 40)]
        for row in rows:
            llm.engine.add([row])
        check(waits_by_step(llm, rows, 7, 7, 8, 8, 7))
    assert set(started) == kernels
