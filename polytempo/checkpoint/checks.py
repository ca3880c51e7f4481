"""One tensor of a checkpoint and its scale: whether dtype and shape are what the model needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from polytempo.checkpoint.headers import TensorEntry
from polytempo.checkpoint.names import Storage, WeightSpec
from polytempo.checkpoint.quant import fp4_scale_shape, fp8_scale_shape

_FLOATS = ("F32", "BF16", "F16")
_PACKED = ("I8", "U8")
_FP8 = "F8_E4M3"
_SCALES = ("F8_E8M0", "U8")
_MOST_NAMES = 100


@dataclass(frozen=True)
class LoadItem:
    """One tensor to load: what it is, where its data lie, and where its scale, if it is quantised."""

    spec: WeightSpec
    weight: TensorEntry
    scale: TensorEntry | None = None

    @property
    def is_fp4(self) -> bool:
        """Whether the weight is packed fp4; with a scale it is fp8 otherwise."""
        return self.scale is not None and self.weight.dtype in _PACKED


def expert_dtype(item: LoadItem) -> str | None:
    """The config's word for how an expert is stored: "fp4", "fp8", or None for unquantised."""
    if item.weight.dtype in _PACKED:
        return "fp4"
    return "fp8" if item.weight.dtype == _FP8 else None


def check_item(item: LoadItem) -> list[str]:
    """Problems with the dtype and shape of one weight and its scale."""
    spec, weight = item.spec, item.weight
    allowed = _allowed_dtypes(spec.storage)
    where = f"{weight.file}: tensor {weight.name!r}"
    if weight.dtype not in allowed:
        return [f"{where} has dtype {weight.dtype}, expected one of {', '.join(allowed)}"]
    is_packed = weight.dtype in _PACKED
    shape = (*spec.shape[:-1], spec.shape[-1] // 2) if is_packed else spec.shape
    if weight.shape != shape:
        packed = f" (fp4 of unpacked shape {spec.shape})" if is_packed else ""
        return [f"{where} has shape {weight.shape}, expected {shape}{packed}"]
    if not (is_packed or weight.dtype == _FP8):
        if item.scale is not None:
            return [
                f"{item.scale.file}: scale {item.scale.name!r} belongs to {weight.name!r}, which is "
                f"{weight.dtype} and takes none"
            ]
        return []
    if item.scale is None:
        return [f"{where} is {weight.dtype}, but its scale {spec.scale_name!r} is missing"]
    return _check_scale(item, fp4_scale_shape(spec.shape) if is_packed else fp8_scale_shape(spec.shape))


def _check_scale(item: LoadItem, shape: tuple[int, ...]) -> list[str]:
    scale = item.scale
    where = f"{scale.file}: scale {scale.name!r} of {item.weight.dtype} tensor {item.weight.name!r}"
    if scale.dtype not in _SCALES:
        return [f"{where} has dtype {scale.dtype}, expected F8_E8M0, or U8 with the same meaning"]
    if scale.shape != shape:
        return [f"{where} has shape {scale.shape}, expected {shape}"]
    return []


def _allowed_dtypes(storage: Storage) -> tuple[str, ...]:
    if storage is Storage.INT64:
        return ("I64", "I32")
    if storage is Storage.EXPERT:
        return (*_FLOATS, _FP8, *_PACKED)
    return (*_FLOATS, _FP8) if storage is Storage.FP8 else _FLOATS


def list_names(names: list[str]) -> str:
    """Names for a message: all of them, or with the experts folded where there are many."""
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    folded: Counter[str] = Counter()
    for name in names:
        head, found, tail = name.partition(".experts.")
        folded[f"{head}.experts.*.{tail.partition('.')[2]}" if found else name] += 1
    texts = [f"{name} ({count})" if count > 1 else name for name, count in folded.items()]
    rest = f", ... ({len(texts) - _MOST_NAMES} more)" if len(texts) > _MOST_NAMES else ""
    return ", ".join(texts[:_MOST_NAMES]) + rest
