"""Seconds of the C++ kernels by part."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def part_seconds(library: ctypes.CDLL) -> Iterator[dict[str, float]]:
    """Time the parts of every forward within the block.

    Of one thread's forwards: several threads' times would be added up without order.

    Args:
        library: from `kernels.build.load`.

    Yields:
        Seconds by part, on the calling thread; filled in when the block ends.
    """
    seconds: dict[str, float] = {}
    library.pt_profile(1)
    try:
        yield seconds
    finally:
        index = 0
        while name := library.pt_part_name(index):
            seconds[name.decode()] = library.pt_part_seconds(index)
            index += 1
        library.pt_profile(0)
