"""Which device an option names, and how the host's numbers get there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from polytempo.errors import ConfigError, unknown_option

AUTO = "auto"
CPU = "cpu"
"""The default: identity of tokens is promised there, on every machine."""
KNOWN = (AUTO, CPU, "cuda")


def resolve_device(name: str | torch.device) -> torch.device:
    """The device that a `device` option means, if it can be used here.

    Args:
        name: "cpu", "cuda" (the current CUDA device), "cuda:1", a torch.device, or "auto": "cuda" where there is a CUDA
            device, else "cpu".

    Returns:
        The device; of CUDA devices with its index.

    Raises:
        ConfigError: there is no such device, this torch cannot use it, or it is of a kind that polytempo does not
            run on. Raised before anything is allocated.
    """
    if name == AUTO:
        name = "cuda" if torch.cuda.is_available() else CPU
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        kind, _, index = str(name).partition(":")
        if kind in KNOWN and index:
            raise ConfigError(f"option 'device' is {name!r}; write {kind!r}, or an index as in 'cuda:1'") from None
        raise ConfigError("option 'device': " + unknown_option("device", str(name), KNOWN)) from None
    if device.type == CPU:
        if device.index:
            raise ConfigError(f"option 'device' is {str(name)!r}; all CPUs are one device, 'cpu'")
        return torch.device(CPU)
    if device.type != "cuda":
        raise ConfigError(
            f"option 'device' is {str(name)!r}; polytempo runs on {CPU!r} and 'cuda', not on {device.type!r}"
        )
    return _cuda_device(device)


def _cuda_device(device: torch.device) -> torch.device:
    """With its index, if this torch finds it."""
    if not torch.cuda.is_available():
        # HIP builds of torch call their devices "cuda" too.
        has_cuda = torch.version.cuda is not None or torch.version.hip is not None
        reason = "finds no CUDA device" if has_cuda else "is built without CUDA; install a build with it"
        raise ConfigError(
            f"option 'device' is {str(device)!r}, but this torch ({torch.__version__}) {reason}; 'cpu' runs everywhere"
        )
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        found = "there is only 'cuda:0'" if count == 1 else f"there are 'cuda:0' to 'cuda:{count - 1}'"
        raise ConfigError(f"option 'device' is {str(device)!r}, but {found}")
    return torch.device("cuda", index)


@contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Make a device the calling thread's current one: kernels that are launched by hand run on that."""
    if device.type == CPU:
        yield
        return
    with torch.cuda.device(device):
        yield


def require_room(device: torch.device, num_bytes: int, what: str, remedy: str) -> None:
    """Refuse what a device's free memory cannot hold, before any of it is allocated. The CPU is not asked: it may swap.

    Args:
        device: where it would go.
        num_bytes: how much.
        what: takes it, in the plural.
        remedy: what else to do.

    Raises:
        ConfigError: there is less; the message has both numbers.
    """
    if device.type == CPU:
        return
    # What torch holds back for itself is free for us.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    if num_bytes > free:
        raise ConfigError(
            f"{what} take {num_bytes / 2**30:.2f} GiB, and {str(device)!r} has {free / 2**30:.2f} GiB free; {remedy}"
        )


def describe_device(device: torch.device) -> str:
    """Its name in reports: "cpu", or for example "cuda:0 (NVIDIA H200)"."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def to_device(values: Sequence | np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the host's numbers, without waiting for what the device is still at.

    `torch.tensor(values, device=device)` waits until everything that was launched before has run: a step that did so
    at every index list would leave the device idle each time.

    Args:
        values: an array, which the tensor may share on the CPU, or a list of numbers.
        device: where they go.
        dtype: None means the values' own.

    Returns:
        The tensor.
    """
    if isinstance(values, np.ndarray):
        tensor = torch.from_numpy(np.ascontiguousarray(values))
    else:
        tensor = torch.tensor(values, dtype=dtype)
    # Safe without pinned memory: the driver has taken the bytes when the call returns (CUDA Runtime API, "API
    # synchronization behavior").
    return tensor if device.type == CPU else tensor.to(device, non_blocking=True)


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays on a device by one transfer: a transfer has a cost of its own, and a step has dozens of short arrays.

    Args:
        arrays: int64, of any shapes.
        device: where they go.

    Returns:
        One tensor per array, of its shape; off the CPU they share one piece of memory.
    """
    if device.type == CPU:
        return [to_device(array, device) for array in arrays]
    packed = to_device(np.concatenate([array.reshape(-1) for array in arrays]), device)
    parts = packed.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
