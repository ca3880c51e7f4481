"""Fuses the training process's elementwise work with torch.compile; inference stays as written."""

from __future__ import annotations

import torch

from polytempo.model import attention, compressor, deepseek_v4, hyper, moe, ops


def install() -> None:
    """Compile the stream mixing, norms, rotations and activations of this process."""

    def fused(function):
        return torch.compile(function, dynamic=False)

    hyper.collapse = deepseek_v4.collapse = fused(hyper.collapse)
    deepseek_v4.expand = fused(hyper.expand)
    hyper.HyperConnection.forward = fused(hyper.HyperConnection.forward)
    ops.RMSNorm.forward = fused(ops.RMSNorm.forward)
    attention.rotate = compressor.rotate = fused(attention.rotate)
    attention.unweighted_rms_norm = fused(ops.unweighted_rms_norm)
    moe.swiglu = torch.compile(ops.swiglu, dynamic=True)
    torch._dynamo.config.cache_size_limit = 64
