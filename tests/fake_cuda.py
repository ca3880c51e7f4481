"""CUDA tensors without a CUDA device: shapes and devices are followed, nothing is computed.

Under torch's FakeTensorMode an operator that mixes devices raises, and so does reading a value of a device's tensor.
What torch does silently, and a device must be waited for, is refused here too: indexing by a tensor of the CPU, copies
that block, masks as indices. So a forward that runs to its end here keeps all its tensors on one device and never makes
the host wait. What it computes is not shown: `tests/gpu` does that on a device.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import cycle
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polytempo.model.moe import Experts

DEVICE = torch.device("cuda", 0)
_GUARDS, _CUDA, _META = "_ZN3c104impl26device_guard_impl_registryE", 1, 14


def lend_device_guard() -> None:
    """Let torch index CUDA tensors in a build without CUDA.

    Python's indexing switches to the tensor's device first, for which such a build has no code; FakeTensorMode helps
    itself only in builds with CUDA. The meta device's code, which does nothing, serves as well.
    """
    if torch.version.cuda is not None or torch.version.hip is not None:
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, _GUARDS)
    guards[_CUDA] = guards[_CUDA] or guards[_META]


class Refusals(TorchDispatchMode):
    """Raises where a device would be waited for without a word, and counts what goes to it.

    Attributes:
        num_uploads: copies of tensors with elements from the host to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_uploads = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator.namespace != "aten":
            return operator(*args, **kwargs)
        with self:  # inference mode hands over operators that are made of others, such as `to`
            result = operator.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        name = operator._schema.name.removeprefix("aten::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_host = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.dim()]
        on_device = [tensor for tensor in tensors if tensor.device.type == "cuda"]
        if name == "_to_copy" and "device" in kwargs:
            is_upload = bool(on_host) and kwargs["device"].type == "cuda"
            assert not (is_upload and not kwargs.get("non_blocking")), "the host waits for the device to copy to it"
            assert not (on_device and kwargs["device"].type == "cpu"), "the host waits for a copy from the device"
            self.num_uploads += is_upload
        elif on_host and on_device:
            raise AssertionError(f"{name} of tensors on {on_host[0].device} and {on_device[0].device}")
        elif name.startswith("index_put") and on_device and args[2].numel() > 1:
            indices = [index for index in args[1] if index is not None]
            assert all(index.dtype is torch.int64 for index in indices), f"{name} counts the elements of a mask"
        return operator(*args, **kwargs)


class Answers:
    """Gives the host a value for what it asks of the device within the block, and counts how often it does.

    Attributes:
        asked: how often each of `tolist` and `__bool__` was asked of a tensor on the device.
    """

    def __init__(self, *values: int) -> None:
        """Fill every answer of `tolist` with one value, the next each time; `bool` is True."""
        self.asked: Counter = Counter()
        self._values = cycle(values)
        self._patches = patch.multiple(FakeTensor, tolist=self._tolist, __bool__=self._bool)

    def __enter__(self) -> Answers:
        self._patches.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.stop()

    @property
    def _tolist(self):
        def tolist(tensor: Tensor):
            assert tensor.device.type == "cuda"
            self.asked["tolist"] += 1
            value = next(self._values)
            return _filled(list(tensor.shape), float(value) if tensor.is_floating_point() else value)

        return tolist

    @property
    def _bool(self):
        def is_true(tensor: Tensor) -> bool:
            assert tensor.device.type == "cuda"
            self.asked["__bool__"] += 1
            return True

        return is_true


def _filled(shape: list[int], value: float):
    return value if not shape else [_filled(shape[1:], value) for _ in range(shape[0])]


class _Event:
    """Passed at once: timing is not what is looked at here."""

    def __init__(self, enable_timing: bool) -> None:
        pass

    def record(self, stream: None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: _Event) -> float:
        return 0.0


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Tensors made within are fake; `DEVICE` can be used."""
    lend_device_guard()
    of_the_runtime = {
        "device": lambda device: nullcontext(), "Event": _Event, "current_stream": lambda device: None,
        "mem_get_info": lambda device: (2**40, 2**40), "memory_reserved": lambda device: 0,
        "memory_allocated": lambda device: 0,
    }  # fmt: skip
    with patch.multiple(torch.cuda, **of_the_runtime), FakeTensorMode():
        yield


def shape_only_experts(self: Experts, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """In the place of `Experts.forward`, whose torch form reads to the host how many tokens each expert got."""
    assert x.device == expert_ids.device == weights.device == next(self.buffers(), next(self.parameters(), None)).device
    return x.float() * weights.sum(-1, keepdim=True) * expert_ids.sum(-1, keepdim=True)
