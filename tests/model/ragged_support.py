"""What the tests of rows beside other rows share: the dtypes, and one model of each."""

from __future__ import annotations

import functools

import pytest
import torch
from support import random_model

each_dtype = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("float32", "bfloat16"))


@functools.cache
def model_of(dtype: torch.dtype):
    return random_model(seed=3, dtype=dtype)
