"""Triton kernels for GPUs, whose results for a row do not depend on how many rows stand beside it.

Each has a twin in torch that says the same slowly. Loaded on first use: the package works without Triton.
"""

from polytempo.lazy import lazy_attributes

__getattr__ = lazy_attributes(__name__, {
    "attend": "polytempo.gpu.attention",
    "expert_outputs": "polytempo.gpu.experts",
    "linear": "polytempo.gpu.products",
    "matmul": "polytempo.gpu.products",
    "rms_norm": "polytempo.gpu.norms",
})
