"""Every kernel compiles for GPUs that need not be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import triton_support  # noqa: F401 skips without Triton

import polytempo

# Bytes per thread. None were seen; a tile that does not fit its registers spills hundreds.
MOST_STACK = 32
# What a block may have on the smallest GPU with bfloat16 (compute capability 8.6 and 8.9).
MOST_SHARED = 99 * 1024


def test_every_kernel_compiles_once_for_any_number_of_rows(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(
        (str(Path(polytempo.__file__).parents[1]), environment.get("PYTHONPATH", "")))}  # fmt: skip
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    built = [json.loads(line) for line in done.stdout.splitlines()]
    seen = {(one["kernel"], one["call"].split(", ")[-1], one["architecture"]) for one in built}
    kernels = {"product_kernel", "rms_norm_kernel", "gate_up_kernel", "down_kernel"}
    dtypes = {"torch.float32", "torch.bfloat16"}
    expected = {(k, d, a) for k in kernels for d in dtypes for a in (80, 90)}
    assert seen == expected | {("attend_kernel", "torch.bfloat16", a) for a in (80, 90)}
    for one in built:
        assert one["cubin"] > 1000, one
        assert one["LOCAL"] == 0 and one["STACK"] <= MOST_STACK and one["dynamic_shared"] <= MOST_SHARED, one
        assert one["variants"] == 1, f"another kernel for another number of rows: {one}"
        # float32 is never rounded to TF32, and bfloat16 does run on tensor cores.
        assert not one["ptx_has_tf32"], one
        is_product = one["kernel"] != "rms_norm_kernel"
        assert one["ptx_has_bf16_mma"] == (is_product and "bfloat16" in one["call"]), one
