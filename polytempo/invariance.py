"""Probe, on this machine, whether a row's result depends on how many rows stand beside it.

Every operation on the path of a forward is run at many row counts, in torch's raw form and in the form that
polytempo uses, at the shapes of a model; `invariance_probes` says what is run. Run as `python -m polytempo.invariance`;
the last line is JSON, and the exit code is 1 if a form that polytempo uses depends on the count.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from polytempo.config import ModelConfig, RopeConfig
from polytempo.device import CPU, current_device, describe_device, resolve_device
from polytempo.errors import PolytempoError
from polytempo.gpu.available import missing_triton
from polytempo.invariance_probes import Probe, probes
from polytempo.model.native_probes import kernels_in_use

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULT_SHAPE = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    moe_intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=128,
    n_routed_experts=64,
    num_experts_per_tok=6,
    compress_ratios=(0, 4, 128),
    rope=RopeConfig(theta=10000.0),
    compress_rope=RopeConfig(theta=160000.0),
    index_n_heads=4,
    index_head_dim=128,
)


@dataclass(frozen=True)
class Verdict:
    """Outcome of a probe: row counts at which the raw and the used form differ from the largest count."""

    probe: Probe
    raw: Sequence[int]
    ours: Sequence[int]

    @classmethod
    def of(cls, probe: Probe) -> Verdict:
        """Run a probe."""
        raw = probe.differing(probe.raw)
        return cls(probe, raw, raw if probe.ours is None else probe.differing(probe.ours))


def run_probes(
    config: ModelConfig, dtypes: Sequence[torch.dtype], quiet: bool = False, device: torch.device | str = CPU
) -> list[Verdict]:
    """Probe every operation on the path.

    Args:
        config: gives the shapes.
        dtypes: of the weights and the state.
        quiet: no progress bar.
        device: where they run; see `resolve_device`.

    Returns:
        One verdict per operation and shape.

    Raises:
        ConfigError: the device cannot be used.
    """
    device = resolve_device(device)
    torch.manual_seed(0)
    with torch.inference_mode(), device, current_device(device):  # tensors are made where the default device says
        return [Verdict.of(probe) for probe in tqdm(probes(config, dtypes), desc="probes", unit="op", disable=quiet)]


def describe(counts: Sequence[int]) -> str:
    """Row counts in words."""
    if not counts:
        return "clean"
    listed = ", ".join(map(str, counts[:4]))
    return f"differs at {listed}" + (f" … {counts[-1]} ({len(counts)} counts)" if len(counts) > 4 else "")


def table(verdicts: Sequence[Verdict]) -> str:
    """One line per verdict, in aligned columns."""
    rows = [("op", "shape", "dtype", "raw", "as used", "fall-back")]
    for verdict in verdicts:
        probe = verdict.probe
        dtype = str(probe.dtype).removeprefix("torch.")
        rows.append((probe.op, probe.shape, dtype, describe(verdict.raw), describe(verdict.ours), probe.fallback))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def summary(verdicts: Sequence[Verdict], source: str, device: torch.device) -> dict[str, object]:
    """What the last line says."""
    failed = [f"{v.probe.op} [{v.probe.shape}] {v.probe.dtype}".replace("torch.", "") for v in verdicts if v.ours]
    return {
        "torch": torch.__version__,
        "device": describe_device(device),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "kernels": kernels_in_use() if device.type == CPU else "torch" if missing_triton() else "triton",
        "threads": torch.get_num_threads(),
        "shapes": source,
        "probes": len(verdicts),
        "raw_differs": sum(bool(verdict.raw) for verdict in verdicts),
        "failed": failed,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m polytempo.invariance", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="checkpoint directory whose config.json gives the shapes")
    parser.add_argument("--dtype", choices=DTYPES, help="only this dtype (default: both)")
    parser.add_argument("--device", default=CPU, help="cpu, cuda, cuda:1, … or auto (default: cpu)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own)")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        if options.threads < 1:
            parser.error(f"--threads is {options.threads}; it must be at least 1")
        torch.set_num_threads(options.threads)
    try:
        device = resolve_device(options.device)
        config = ModelConfig.from_dir(options.model) if options.model else DEFAULT_SHAPE
    except PolytempoError as error:
        parser.error(str(error))
    dtypes = [DTYPES[options.dtype]] if options.dtype else list(DTYPES.values())
    verdicts = run_probes(config, dtypes, device=device)
    print(table(verdicts))
    result = summary(verdicts, str(options.model or "built-in"), device)
    print(json.dumps(result))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
