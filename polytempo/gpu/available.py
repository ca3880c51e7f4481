"""Whether Triton is installed and can start kernels."""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib import import_module

import torch


@lru_cache(maxsize=1)
def missing_triton() -> str | None:
    """Why Triton cannot be used, or None if it can."""
    try:
        import_module("triton")
    except (ImportError, OSError) as error:
        return f"Triton cannot be imported ({error})"
    if torch.cuda.is_available():
        try:
            # Compiles the part of Triton that calls the driver, as each kernel's first start will: that takes a C
            # compiler and Python's headers.
            import_module("triton.runtime").driver.active.get_current_target()
        except Exception as error:  # assertions and all else that its search for driver and compiler ends in
            return f"Triton cannot start kernels ({error!r})"
    return None


@lru_cache(maxsize=1)
def has_triton_or_note() -> bool:
    """Whether Triton can be used; if not, one warning says what that means."""
    reason = missing_triton()
    if reason is not None:
        warnings.warn(
            f"no Triton kernels, torch is used on the GPU instead: {reason}; a row's results may then depend on its "
            "neighbours. 'polytempo[gpu]' installs Triton",
            RuntimeWarning,
            stacklevel=3,
        )
    return reason is None
