"""C++ kernels against the torch path, in one process: per part, per step, and against the products alone.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/kernels.py [--model DIR] [--dtype bfloat16] [--rows 1,8,32,128]
    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/kernels.py --model OFFICIAL --weights packed
    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/kernels.py --weights packed --flags=-mno-avx512vbmi
    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/kernels.py --against=-UPT_SLOW_BF16_DOT

Medians are compared, and both paths' logits must agree. The last line is JSON. "products" is the sum
of a step's matrix products alone, in torch: every weight once over all rows, each expert over its share of the rows,
and attention's two products over the window and the entries. With --weights packed, the kernels over expanded weights
against the kernels over weights as an official checkpoint stores them; every logit of both must be the same.
--flags are added to the compiler's, separated by commas: what another instruction set would do. With --against, the
kernels against others built with these flags more; their bits may differ.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from polytempo.cache.layout import Segment, StateShape
from polytempo.cache.store import RowStore
from polytempo.checkpoint.load import load_model
from polytempo.engine_config import EngineConfig
from polytempo.kernels import build, ops
from polytempo.llm import DEMO_MODEL
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.forward import target_forward
from polytempo.model.rope import RopeTables

CONTEXT, CHUNK, REPEAT = 512, 256, 7


def median_ms(run: Callable[[], object]) -> float:
    """Median milliseconds of REPEAT calls after one for warmth."""
    times = []
    for _ in range(REPEAT + 1):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[1:])


class Setup:
    """Rows at CONTEXT tokens, in a store of their own.

    Args:
        model: with its choice of kernels.
        rows: how many.
    """

    def __init__(self, model: DeepseekV4, rows: int) -> None:
        self.model, self.rows = model, rows
        limits = EngineConfig(max_rows=rows, max_model_len=CONTEXT + 2 * CHUNK, max_step_tokens=max(rows, 1024))
        self.tables = RopeTables.build(model.config, limits.max_model_len)
        self.store = RowStore.allocate(StateShape.build(model.config, limits), rows, model.dtype)
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(2, model.config.vocab_size, (rows, CONTEXT + CHUNK), generator=generator).tolist()

    def forward(self, start: int, count: int, rows: range | None = None) -> torch.Tensor:
        """`count` tokens of these rows from `start` on."""
        segments = [Segment(r, start, self.ids[r][start : start + count]) for r in rows or range(self.rows)]
        view = self.store.target_view(segments, self.model.config.compress_ratios)
        return target_forward(self.model, self.tables, self.store, view)

    def fill(self) -> None:
        """Feed every row's first CONTEXT tokens, a chunk at a time."""
        for row in range(self.rows):
            for start in range(0, CONTEXT, CHUNK):
                self.forward(start, CHUNK, range(row, row + 1))

    def step(self) -> torch.Tensor:
        """The token at CONTEXT of every row, and its logits."""
        with torch.inference_mode():
            return self.model.logits(self.forward(CONTEXT, 1))


def products(model: DeepseekV4, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(x, weight) of every product of a step through the target."""
    config, found = model.config, []
    for path, weight in model.named_parameters():
        if weight.dim() < 2 or path.startswith(("mtp", "embed")) or path.endswith("ape"):
            continue
        parts, count = [weight], rows
        if weight.dim() == 3:  # experts: all rows' choices over as many experts as they can reach
            reached = min(config.n_routed_experts, rows * config.num_experts_per_tok)
            parts, count = list(weight[:reached]), max(1, rows * config.num_experts_per_tok // reached)
        elif path.endswith("wo_a.weight"):
            parts = list(weight.chunk(config.o_groups))
        found += [(torch.randn(count, part.shape[1]).to(part.dtype), part) for part in parts]
    return found


def attention_products(model: DeepseekV4, rows: int) -> Callable[[], None]:
    """QK and PV of all layers over window and entries at CONTEXT, keys shared by a row's heads."""
    config, pairs = model.config, []
    for ratio in config.compress_ratios:
        entries = min(CONTEXT // ratio, config.index_topk if ratio == 4 else CONTEXT) if ratio else 0
        keys = torch.randn(rows, config.sliding_window + entries, config.head_dim).to(model.dtype)
        pairs.append((torch.randn(rows, config.num_attention_heads, config.head_dim).to(model.dtype), keys))

    def run() -> None:
        for q, keys in pairs:
            torch.matmul(torch.matmul(q, keys.transpose(1, 2)), keys)

    return run


def measure(models: dict[str, DeepseekV4], rows: int) -> dict[str, float]:
    """Milliseconds at this many rows."""
    result, setups = {"rows": rows}, {name: Setup(model, rows) for name, model in models.items()}
    setups["native"].fill()
    setups["torch"].store = copy.deepcopy(setups["native"].store)
    logits = {name: setup.step().float() for name, setup in setups.items()}
    difference = (logits["native"] - logits["torch"]).abs().mean() / logits["torch"].std()
    assert difference < 0.05, f"the paths disagree by {difference:.3f} standard deviations"
    result |= {f"step_{name}": median_ms(setup.step) for name, setup in setups.items()}
    pairs, library = products(models["torch"], rows), models["native"].native.library
    with torch.inference_mode():
        result["attention_torch"] = median_ms(attention_products(models["torch"], rows))
        result["linear_torch"] = median_ms(lambda: [F.linear(x, weight) for x, weight in pairs])
        result["products"] = result["attention_torch"] + result["linear_torch"]
        result["linear_native"] = median_ms(lambda: [ops.linear(library, x, weight) for x, weight in pairs])
    return result


def prefill(models: dict[str, DeepseekV4]) -> dict[str, float]:
    """Tokens per second of one row's chunk of CHUNK tokens after another."""
    setups = {name: Setup(model, 1) for name, model in models.items()}
    return {f"prefill_{name}": CHUNK / median_ms(lambda s=setup: s.forward(CHUNK, CHUNK)) * 1e3
            for name, setup in setups.items() if setup.fill() is None}  # fmt: skip


def measure_in_turns(models: dict[str, DeepseekV4], rows: int, is_equal: bool) -> dict[str, float]:
    """Milliseconds of a step of two models, the same logits demanded or not."""
    setups = {name: Setup(model, rows) for name, model in models.items()}
    first, second = setups.values()
    first.fill()
    second.store = copy.deepcopy(first.store)
    logits = [setup.step() for setup in setups.values()]
    assert not is_equal or torch.equal(*logits), "packed weights changed a logit"
    times: dict[str, list[float]] = {name: [] for name in setups}
    for _ in range(REPEAT):
        for name, setup in setups.items():
            started = time.perf_counter()
            setup.step()
            times[name].append((time.perf_counter() - started) * 1e3)
    return {"rows": rows, **{f"step_{name}": statistics.median(each) for name, each in times.items()}}


def compare_packed(options: argparse.Namespace) -> None:
    """Print what expanded and packed weights take, and how fast both are."""
    models = {
        name: load_model(options.model, options.dtype, progress=False, weights=name)[0].with_kernels("native")
        for name in ("expanded", "packed")
    }
    held = {n: sum(t.nbytes for t in (*m.parameters(), *m.buffers())) / 2**20 for n, m in models.items()}
    print(f"weights: expanded {held['expanded']:.1f} MiB, packed {held['packed']:.1f} MiB")
    print_turns(models, options, is_equal=True, mib=held)


def compare_flags(options: argparse.Namespace) -> None:
    """Print how fast the kernels are, and how fast with the flags of --against."""
    models = {}
    for name, flags in (("against", options.against), ("this", "")):
        with_flags = (*build.FLAGS, *filter(None, flags.split(",")))
        model, _ = load_model(options.model, options.dtype, progress=False, weights=options.weights)
        before, build.FLAGS = build.FLAGS, with_flags
        models[name] = model.with_kernels("native")
        build.FLAGS = before
    print_turns(models, options, is_equal=False)


def print_turns(models: dict[str, DeepseekV4], options: argparse.Namespace, is_equal: bool, **more: object) -> None:
    """Table and JSON of two models, by rows."""
    results = [measure_in_turns(models, int(rows), is_equal) for rows in options.rows.split(",")]
    first, second = models
    print(f"{'rows':>5} {first + ' tok/s':>14} {second + ' tok/s':>13} {second + '/' + first:>15}")
    for r in results:
        old, new = (r["rows"] / r[f"step_{name}"] * 1e3 for name in models)
        print(f"{r['rows']:5} {old:14.1f} {new:13.1f} {new / old:15.2f}")
    print(json.dumps({"dtype": str(models[first].dtype), "threads": options.threads, **more, "results": results}))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", default="1,8,32,128")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--weights", choices=("expanded", "packed"), default="expanded")
    parser.add_argument("--flags", default="")
    parser.add_argument("--against", default=None)
    options = parser.parse_args()
    build.FLAGS = (*build.FLAGS, *filter(None, options.flags.split(",")))
    torch.set_num_threads(options.threads)
    if options.against is not None:
        compare_flags(options)
        return
    if options.weights == "packed":
        compare_packed(options)
        return
    base, _ = load_model(options.model, options.dtype, progress=False)
    models = {name: base.with_kernels(name) for name in ("torch", "native")}
    results = [measure(models, int(rows)) for rows in options.rows.split(",")]
    print(f"{'rows':>5} {'torch ms':>9} {'native ms':>9} {'ratio':>6} {'products ms':>11} {'native/products':>15}")
    for r in results:
        print(f"{r['rows']:5} {r['step_torch']:9.2f} {r['step_native']:9.2f} {r['step_torch'] / r['step_native']:6.1f} "
              f"{r['products']:11.2f} {r['step_native'] / r['products']:15.2f}")  # fmt: skip
    speeds = prefill(models)
    print("prefill tokens/s: " + ", ".join(f"{name.split('_')[1]} {speed:.0f}" for name, speed in speeds.items()))
    print(json.dumps({"dtype": str(base.dtype), "threads": options.threads, "results": results, **speeds}))


if __name__ == "__main__":
    main()
