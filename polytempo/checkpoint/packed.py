"""Loading a model whose quantised weights stay as the checkpoint stores them.

Every tensor is read from its file straight to where it will stay, so that memory peaks at the model plus one
unquantised tensor.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from polytempo.checkpoint.checks import LoadItem
from polytempo.checkpoint.headers import TensorEntry
from polytempo.checkpoint.quant import dequantise_fp4, dequantise_fp8, fp4_scale_shape, fp8_scale_shape
from polytempo.checkpoint.reader import Checkpoint
from polytempo.errors import CheckpointError, ConfigError
from polytempo.kernels.build import load_or_note
from polytempo.kernels.structs import FP4, FP8
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.packed import Packed, PackedLinear

_DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "I32": torch.int32,
}  # fmt: skip
_FP8_NAN = 0x7F
# Above this exponent byte a finite code times its scale may not be finite.
_HIGHEST_SAFE_SCALE = 240


def require_packed(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that has nothing to keep packed, or stacks that are stored in two ways.

    Args:
        checkpoint: its headers.

    Raises:
        ConfigError: no weight is quantised.
        CheckpointError: a block's experts are stored in different formats; the message names two of them.
    """
    if not any(item.scale for item in checkpoint.items):
        kinds = ", ".join(sorted({item.weight.dtype for item in checkpoint.items}))
        raise ConfigError(
            f"option 'weights' is 'packed', but {checkpoint.path} holds no quantised weight ({kinds}); use 'expanded', "
            "which takes no more memory, or `polytempo export --to official --quantise fp8-fp4` first"
        )
    if unlike := _stored_unlike(checkpoint):
        item, other = unlike
        raise CheckpointError(
            f"{item.weight.file}: tensor {item.weight.name!r} is {item.weight.dtype}, but {other.weight.name!r} is "
            f"{other.weight.dtype}; weights='packed' needs all experts of a block stored alike, use 'expanded'"
        )


def prefers_packed(checkpoint: Checkpoint, device: torch.device) -> bool:
    """Whether a model of this checkpoint runs at least as fast here if its weights stay packed.

    Args:
        checkpoint: its headers.
        device: where the model goes.

    Returns:
        True if something is quantised that `require_packed` lets pass, and the C++ kernels, which are built if they
        are not yet, decode packed weights fast enough on this machine (docs/kernels.md has the measurements).
    """
    if device.type != "cpu" or not any(item.scale for item in checkpoint.items) or _stored_unlike(checkpoint):
        return False
    library = load_or_note()
    return library is not None and bool(library.pt_prefers_packed())


def _stored_unlike(checkpoint: Checkpoint) -> tuple[LoadItem, LoadItem] | None:
    """Two experts of a block that are stored in different formats, if there are any."""
    first: dict[str, LoadItem] = {}
    for item in checkpoint.items:
        other = first.setdefault(item.spec.key, item)
        if _stored_as(item) != _stored_as(other):
            return item, other
    return None


def _stored_as(item: LoadItem) -> str:
    return "plain" if item.scale is None else "fp4" if item.is_fp4 else "fp8"


def build_packed(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> DeepseekV4:
    """An empty model whose quantised matrices have room for codes and scales, and none for values.

    Args:
        checkpoint: as `require_packed` let it pass.
        dtype: of what is not quantised, and of expanded values.
        device: where everything lies.

    Returns:
        A model with a `PackedLinear` for every quantised matrix and a `Packed` for every quantised stack of experts.
    """
    model = DeepseekV4(checkpoint.config, dtype, "meta")
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for key, item in {item.spec.key: item for item in checkpoint.items if item.scale}.items():
        path, _, leaf = key.rpartition(".")
        # Experts' w13 has two matrices per expert, each with scales of its own, and w2 has one.
        lead = (shapes[key][0], shapes[key][1] // item.spec.shape[0]) if item.spec.where else ()
        packed = _empty(item, lead, dtype)
        if leaf == "weight":
            model.set_submodule(path, PackedLinear(packed))
        else:
            owner = model.get_submodule(path)
            delattr(owner, leaf)
            owner.add_module(leaf, packed)
    return model.to_empty(device=device)


def _empty(item: LoadItem, lead: tuple[int, ...], dtype: torch.dtype) -> Packed:
    shape = item.spec.shape
    scale_shape = fp4_scale_shape(shape) if item.is_fp4 else fp8_scale_shape(shape)
    codes = torch.empty(*lead, *item.weight.shape, dtype=torch.uint8, device="meta")
    scales = torch.empty(*lead, *scale_shape, dtype=torch.uint8, device="meta")
    return Packed(codes, scales, FP4 if item.is_fp4 else FP8, dtype, dequantise_fp4 if item.is_fp4 else _expand_fp8)


def _expand_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantise_fp8(codes.view(torch.float8_e4m3fn), scales, dtype)


def place(model: nn.Module, item: LoadItem) -> tuple[Tensor, Tensor]:
    """Where a quantised weight's codes and scales go.

    Args:
        model: from `build_packed`.
        item: a tensor with a scale.

    Returns:
        Views [rows, bytes of a row] and [row blocks, column blocks] uint8, contiguous.
    """
    spec = item.spec
    packed = model.get_submodule(spec.key if spec.where else spec.key.removesuffix("weight") + "stored")
    index: tuple[int, ...] = ()
    if spec.where:
        expert, *rows = spec.where
        index = (expert, rows[0].start // spec.shape[0] if rows else 0)
    return packed.codes[index], packed.scales[index]


def may_overflow(item: LoadItem, codes: Tensor, scales: Tensor) -> bool:
    """Whether values might not be finite, so that they must be looked at; codes and scales alone are quicker to see.

    Args:
        item: a tensor with a scale.
        codes: from `place`.
        scales: from `place`, without NaN.

    Returns:
        False only if all values are finite.
    """
    if int(scales.max()) > _HIGHEST_SAFE_SCALE:
        return True
    return not item.is_fp4 and any(((band & _FP8_NAN) == _FP8_NAN).any() for band in codes.split(4096))


class RawReader:
    """Reads tensors of a checkpoint's files into memory that is there already, without mapping the files.

    Args:
        path: the checkpoint directory.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._files, self._stack = path, {}, ExitStack()

    def __enter__(self) -> RawReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, entry: TensorEntry) -> Tensor:
        """One tensor on the CPU, in its own dtype and shape.

        Raises:
            CheckpointError: the file has become shorter since its header was read.
        """
        tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
        self._fill(entry, tensor.view(-1).view(torch.uint8))
        return tensor

    def read_bytes(self, entry: TensorEntry, to: Tensor) -> None:
        """One tensor's bytes to contiguous uint8 memory of the same number of bytes, on any device.

        Raises:
            CheckpointError: as `read`.
        """
        staging = to if to.device.type == "cpu" else torch.empty_like(to, device="cpu")
        self._fill(entry, staging.view(-1))
        if staging is not to:
            to.copy_(staging)

    def _fill(self, entry: TensorEntry, to: Tensor) -> None:
        if not to.numel():
            return
        file, start = self._open(entry.file)
        file.seek(start + entry.start)
        count = file.readinto(memoryview(to.numpy()))
        if count != entry.num_bytes:
            raise CheckpointError(
                f"{self._path / entry.file}: tensor {entry.name!r} has {count} of {entry.num_bytes} bytes; the file "
                "was cut short while it was read"
            )

    def _open(self, name: str) -> tuple[BinaryIO, int]:
        """A file of the checkpoint and where its data begin, behind a header and that header's length."""
        if name not in self._files:
            file = self._stack.enter_context((self._path / name).open("rb"))
            self._files[name] = file, 8 + int.from_bytes(file.read(8), "little")
        return self._files[name]
