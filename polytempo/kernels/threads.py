"""How many threads the kernels take, and keeping torch's own out of their way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_kernel_threads: ContextVar[int | None] = ContextVar("kernel_threads", default=None)
# What torch had before each `torch_on_one_thread` in progress, of all threads of the process.
_before: list[int] = []


def kernel_threads() -> int:
    """Most threads of a kernel: as many as torch has, or had before `torch_on_one_thread`.

    A thread that asks torch for the first time while another is in `torch_on_one_thread` is told 1, for good: it gets
    what the other had.
    """
    return _kernel_threads.get() or max([torch.get_num_threads(), *_before])


@contextmanager
def torch_on_one_thread(wanted: bool = True) -> Iterator[None]:
    """Run torch's own operators on the calling thread alone; the kernels keep their threads.

    After each parallel operator the threads of OpenMP spin for milliseconds, on the very cores on which the kernels'
    threads would run: a step of 128 rows took 100 ms instead of 81 on two cores.

    Args:
        wanted: False does nothing, for callers that may not use the kernels.
    """
    threads = kernel_threads()
    if not wanted or _kernel_threads.get() or threads == 1:
        yield
        return
    token = _kernel_threads.set(threads)
    _before.append(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _before.remove(threads)
        _kernel_threads.reset(token)
