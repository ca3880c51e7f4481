"""Compile every kernel for GPUs that need not be there; prints one JSON line per kernel, dtype and architecture.

A process of its own: Triton decides once, when it is imported, whether kernels are compiled or interpreted.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from polytempo import gpu
from polytempo.gpu import grid

ARCHITECTURES = (80, 90)
ROW_COUNTS = (7, 1, 2, 16, 40)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.uint8: "*u8"}
ALIGNED = [["tt.divisibility", 16]]


def calls(dtype: torch.dtype, rows: int) -> dict[str, Callable[[], object]]:
    """Calls that between them launch every kernel, at sizes of a real model and at sizes that divide by nothing."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    ids = empty(rows, 6, dtype=torch.int64)
    window, mask = empty(rows, 192, 512), empty(rows, 1, 192, dtype=torch.bool)
    chosen, is_chosen = empty(rows, 1, 512, 512), empty(rows, 1, 512, dtype=torch.bool)
    sink, parts = empty(64, dtype=torch.float32), [(window, mask), (chosen, is_chosen)]
    attention = {
        "attend": lambda: gpu.attend(empty(rows, 1, 64, 512), parts, sink, 0.04),
        "attend, wide tiles": lambda: gpu.attend(
            empty(2, rows, 64, 512),
            [(empty(2, 192, 512), empty(2, rows, 192, dtype=torch.bool)),
             (empty(2, rows, 512, 512), empty(2, rows, 512, dtype=torch.bool))], sink, 0.04),
        "attend, window alone": lambda: gpu.attend(empty(rows, 1, 64, 512), parts[:1], sink, 0.04),
    }
    return (attention if dtype == torch.bfloat16 else {}) | {
        "linear": lambda: gpu.linear(empty(rows, 4096), empty(1536, 4096)),
        "linear, odd sizes": lambda: gpu.linear(empty(rows, 33), empty(9, 33)),
        "matmul": lambda: gpu.matmul(empty(16, rows, 512), empty(16, 1024, 512).transpose(1, 2)),
        "rms_norm": lambda: gpu.rms_norm(empty(rows, 4096), 1e-6),
        "rms_norm, weighted": lambda: gpu.rms_norm(empty(rows, 512), 1e-6, empty(512, dtype=torch.float32)),
        "rms_norm, long rows": lambda: gpu.rms_norm(empty(rows, 28672), 1e-6),
        "experts": lambda: gpu.expert_outputs(empty(rows, 4096), ids, empty(9, 4096, 4096), empty(9, 4096, 2048), 10.0),
        "experts, odd sizes": lambda: gpu.expert_outputs(empty(rows, 33), ids, empty(9, 10, 33), empty(9, 33, 5), 10.0),
    }


def source(kernel: triton.JITFunction, arguments: tuple, constants: dict[str, object]) -> ASTSource:
    """What a launch with these arguments would compile."""
    signature, attributes, constants = {}, {}, dict(constants)
    for place, name in enumerate(kernel.arg_names):
        value = constants[name] if name in constants else arguments[place]
        is_special = isinstance(value, int) and name not in kernel.do_not_specialize
        if name in constants or (is_special and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(place,)] = ALIGNED
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if is_special and value % 16 == 0:
                attributes[(place,)] = ALIGNED
    return ASTSource(kernel, signature, {(kernel.arg_names.index(n),): v for n, v in constants.items()}, attributes)


def resources(cubin: bytes) -> dict[str, int]:
    """What a thread of the kernel takes: REG in registers, the others in bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(CUOBJDUMP), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(count) for name, count in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def main() -> None:
    """Compile all."""
    launches: list[tuple] = []

    def record(kernel, num_programs, first, *arguments, **constants):
        launches.append((kernel, source(kernel, (first, *arguments), constants)))

    grid.launch = record
    for dtype in (torch.float32, torch.bfloat16):
        for name in calls(dtype, 1):
            launches.clear()
            for rows in ROW_COUNTS:
                calls(dtype, rows)[name]()
            sources = dict(reversed(launches))
            for kernel, wanted in sources.items():
                variants = {other.hash() for launched, other in launches if launched is kernel}
                for architecture in ARCHITECTURES:
                    built = triton.compile(wanted, target=GPUTarget("cuda", architecture, 32))
                    found = {
                        "kernel": kernel.fn.__name__, "call": f"{name}, {dtype}", "architecture": architecture,
                        "variants": len(variants), "cubin": len(built.asm["cubin"]),
                        "dynamic_shared": built.metadata.shared, "ptx_has_tf32": "tf32" in built.asm["ptx"],
                        "ptx_has_bf16_mma": bool(re.search(r"mma\S*\.bf16", built.asm["ptx"])),
                        **resources(built.asm["cubin"]),
                    }  # fmt: skip
                    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
