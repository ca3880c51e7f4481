"""Peak memory of loading an official checkpoint of about 250 MB in 8 shards, scales apart from their weights.

Usage: python benchmarks/loading.py [--dtype bfloat16] [--weights packed]
The bound is the weights in memory plus two shards. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_SHARDS = 8
CONFIG = {
    "vocab_size": 8192, "hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 16, "head_dim": 128, "qk_rope_head_dim": 32, "q_lora_rank": 256, "o_groups": 4,
    "o_lora_rank": 256, "n_routed_experts": 32, "num_experts_per_tok": 4, "index_n_heads": 8,
    "index_head_dim": 64, "index_topk": 64, "sliding_window": 128, "hc_mult": 4, "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 4, 128, 4, 0], "num_nextn_predict_layers": 1,
}  # fmt: skip


def make_checkpoint(folder: Path) -> None:
    """Write random weights; every scale goes to the shard beside its weight's, the last shard comes first."""
    import torch
    from safetensors.torch import load_file, save_file

    from polytempo.checkpoint import export_model
    from polytempo.config import ModelConfig
    from polytempo.model.deepseek_v4 import DeepseekV4

    torch.manual_seed(0)
    model = DeepseekV4(ModelConfig.from_dict(CONFIG), torch.bfloat16, "cpu").requires_grad_(False)
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.normal_(std=0.02)
    export_model(model, folder, quantise="fp8-fp4")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors, key=lambda name: (name.rpartition(".")[0], name))
    per_shard = sum(value.nbytes for value in tensors.values()) / NUM_SHARDS
    file_of, written = {}, 0
    for name in names:
        shard = min(int(written / per_shard), NUM_SHARDS - 1)
        if name.endswith(".scale"):
            shard = (shard + 1) % NUM_SHARDS
        file_of[name] = f"model-{NUM_SHARDS - shard:05d}-of-{NUM_SHARDS:05d}.safetensors"
        written += tensors[name].nbytes
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in names if file_of[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    (folder / "model.safetensors").unlink()


def peak_bytes() -> int:
    """Largest resident set of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage starts at the peak of the process that started this one.
        peaks = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        if peaks:
            return 1024 * int(peaks[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def load_in_this_process(folder: Path, dtype: str, weights: str) -> None:
    """Load once and print what it took."""
    from polytempo.checkpoint import load_model

    before, start = peak_bytes(), time.perf_counter()
    model, report = load_model(folder, dtype=dtype, progress=False, weights=weights)
    seconds = time.perf_counter() - start
    print(
        json.dumps(
            {
                "seconds": round(seconds, 2),
                "peak_bytes": peak_bytes() - before,
                "weight_bytes": sum(value.nbytes for value in model.state_dict().values()),
                "parameters": report.num_parameters,
            }
        )
    )


def load_runs(folder: Path, dtype: str, repeat: int, weights: str = "expanded") -> list[dict]:
    """Load a checkpoint so often, each time in a fresh process; what `load_in_this_process` prints of each."""
    command = [sys.executable, __file__, "--load", str(folder), "--dtype", dtype, "--weights", weights]
    outputs = (subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(repeat))
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> None:
    """Build the checkpoint, load it in a fresh process, compare with the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--weights", default="expanded", choices=["expanded", "packed"])
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        return make_checkpoint(options.make)
    if options.load:
        return load_in_this_process(options.load, options.dtype, options.weights)
    with tempfile.TemporaryDirectory() as folder:
        # Made in another process too: a child's largest resident set starts at its parent's.
        subprocess.run([sys.executable, __file__, "--make", folder], check=True)
        shards = [file.stat().st_size for file in Path(folder).glob("*.safetensors")]
        result = load_runs(Path(folder), options.dtype, 1, options.weights)[0]
    result["disk_bytes"], result["shards"], result["largest_shard_bytes"] = (
        sum(shards),
        len(shards),
        max(shards),
    )
    result["bound_bytes"] = result["weight_bytes"] + 2 * max(shards)
    result["within_bound"] = result["peak_bytes"] <= result["bound_bytes"]
    for name in ("disk_bytes", "largest_shard_bytes", "weight_bytes", "peak_bytes", "bound_bytes"):
        print(f"{name:<20} {result[name] / 2**20:9.1f} MiB")
    print(f"{'seconds':<20} {result['seconds']:9.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
