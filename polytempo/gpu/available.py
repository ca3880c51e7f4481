"""Whether Triton is installed."""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib import import_module


@lru_cache(maxsize=1)
def missing_triton() -> str | None:
    """Why Triton cannot be imported, or None if it can."""
    try:
        import_module("triton")
    except (ImportError, OSError) as error:
        return f"Triton cannot be imported ({error})"
    return None


@lru_cache(maxsize=1)
def has_triton_or_note() -> bool:
    """Whether Triton is there; if not, one warning says what that means."""
    if missing_triton() is None:
        return True
    warnings.warn(
        f"no Triton kernels, torch is used on the GPU instead: {missing_triton()}; a row's results may then depend on "
        "its neighbours. Install 'polytempo[gpu]'",
        RuntimeWarning,
        stacklevel=3,
    )
    return False
