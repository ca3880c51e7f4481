"""Names of a package that are imported on first use, so that nobody waits for what he does not use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_attributes(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """A package's `__getattr__`.

    Args:
        package: its `__name__`.
        homes: name -> the module that has it.

    Returns:
        A function that raises AttributeError for other names.
    """

    def get(name: str) -> object:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
