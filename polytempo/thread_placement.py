"""Threads that get in each other's way make a step many times slower, and nothing else says so."""

from __future__ import annotations

import os
import warnings
from functools import lru_cache

import torch
from threadpoolctl import threadpool_info


@lru_cache(maxsize=1)
def warn_about_threads() -> None:
    """Warn once per process of what `thread_faults` finds."""
    for fault in thread_faults():
        warnings.warn(fault, RuntimeWarning, stacklevel=3)


def thread_faults() -> list[str]:
    """What is wrong with the threads of this process on this machine, each with what to do.

    Returns:
        Sentences: more torch threads than processors, and more than one OpenMP runtime. On two cores a second program
        on one of them made a step of the torch path 20 times as long.
    """
    faults = []
    threads, usable = torch.get_num_threads(), usable_processors()
    if threads > usable:
        faults.append(
            f"torch has {threads} threads, but this process may use {usable} processors: steps will be many times "
            f"slower; set OMP_NUM_THREADS={usable} or call torch.set_num_threads({usable})"
        )
    runtimes = sorted({info["filepath"] for info in threadpool_info() if info["user_api"] == "openmp"})
    if len(runtimes) > 1:
        faults.append(
            f"{len(runtimes)} OpenMP runtimes are loaded ({', '.join(runtimes)}): the threads of one spin on the "
            "processors of the other; leave one of the packages that bring them out of this process"
        )
    return faults


def usable_processors() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
