"""torch.compile on the torch path: a decode step's time, recompilations, compile time, and whether rows stay exact.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/compile.py [--dtype float32,bfloat16] [--rows 1,8,32,128]
    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/compile.py --blocks 1,2 --dtype float32 [--trace-only]

Ways: "eager", the torch path as it is; "chains", its small chains (mHC site with Sinkhorn, norms, RoPE, gate)
under torch.compile(dynamic=True); "padded", the same with rows padded to a multiple of 16 for the chains;
"native", the C++ kernels. A row is exact if each bit of its logits beside others is that of the row alone in the
same way. Compile times are of fresh processes, with an empty cache and then with the one that was left.
With --blocks, whole blocks instead: what keeps them from being one graph, how often they are compiled anew, and their
times with the experts' dispatch left outside. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo
from compile_blocks import run_blocks
from compile_parts import FUNCTIONS, MOST_ROWS, Chains, Steps, chain_arguments, differ
from torch import Tensor
from torch._dynamo.utils import counters

from polytempo.checkpoint.load import load_model
from polytempo.llm import DEMO_MODEL
from polytempo.model import ops

WAYS = ("eager", "chains", "padded", "native")
COMPILED = {"chains": 1, "padded": 16}  # rows are padded to a multiple of this
SWEEP = (1, 2, 3, 5, 8, 12, 15, 16, 17, 24, 31, 32, 33, 64, 100, 127, 128)
REPEAT = 15
Step = Callable[[range], Tensor]
Taken = dict[str, tuple[list[float], list[float]]]


def steps_of(steps: Steps, way: str) -> Step:
    """The function of a way; rows to logits."""
    if way not in COMPILED:
        return {"eager": steps.eager, "native": steps.kernels}[way]
    chains = Chains(COMPILED[way])

    def step(rows: range) -> Tensor:
        with chains.in_place():
            return steps.eager(rows, chains)

    return step


def graphs() -> int:
    """Graphs compiled so far."""
    return counters["stats"]["unique_graphs"]


def sweep(step: Step) -> dict[str, object]:
    """Rows from 1 to 128 and back: seconds of the steps that compiled something, and graphs per row count."""
    seconds, compiled = 0.0, {}
    for count in SWEEP:
        before, started = graphs(), time.perf_counter()
        step(range(count))
        if graphs() > before:
            seconds += time.perf_counter() - started
            compiled[count] = graphs() - before
    before = graphs()
    for count in reversed(SWEEP):
        step(range(count))
    total = sum(compiled.values())
    return {"seconds": seconds, "graphs": compiled, "total": total, "on_the_way_back": graphs() - before}


def differing(step: Step) -> dict[str, object]:
    """Rows whose logits beside others are not, bit for bit, those of the row alone."""
    alone = torch.cat([step(range(row, row + 1)) for row in range(MOST_ROWS)])
    found, compared = {}, 0
    for count in SWEEP[1:]:
        for first in sorted({0, 5, MOST_ROWS - count}):
            if first + count > MOST_ROWS:
                continue
            compared += count
            different = differ(step(range(first, first + count)), alone[first : first + count])
            found[count] = found.get(count, 0) + different
    return {"compared": compared, "differing": sum(found.values()), "by_count": {k: v for k, v in found.items() if v}}


def chain_times(steps: Steps, compiled: dict[str, Callable], rows: int) -> dict[str, dict[str, list[float]]]:
    """Median microseconds of each chain, eager and compiled: in a loop of its own, and in a step."""
    loop: Taken = {name: ([], []) for name in FUNCTIONS}
    inside: Taken = {name: ([], []) for name in FUNCTIONS}
    ways = (FUNCTIONS, compiled)
    for name, arguments in chain_arguments(steps.torch, rows).items():
        for function, taken in zip((way[name] for way in ways), loop[name], strict=True):
            for _ in range(3 * REPEAT):
                timed(function, taken)(*arguments)
    for _ in range(REPEAT):
        for way_idx, functions in enumerate(ways):
            chains = Chains()
            chains.call = {name: timed(function, inside[name][way_idx]) for name, function in functions.items()}
            with chains.in_place():
                steps.eager(range(rows), chains)
    return {
        name: {where: list(map(statistics.median, taken[name])) for where, taken in (("loop", loop), ("step", inside))
               if taken[name][0]}
        for name in FUNCTIONS
    }  # fmt: skip


def timed(function: Callable, taken: list[float]) -> Callable:
    """The function, noting the microseconds of each call."""

    def call(*arguments: object) -> object:
        started = time.perf_counter()
        result = function(*arguments)
        taken.append((time.perf_counter() - started) * 1e6)
        return result

    return call


def other_order(step: Step, other: Step) -> dict[str, int]:
    """Rows whose logits depend on which row count was compiled first: `other` meets 128 rows before fewer."""
    differing = compared = 0
    for count in reversed(SWEEP):
        compared, differing = compared + count, differing + differ(other(range(count)), step(range(count)))
    return {"compared": compared, "differing": differing}


def times(ways: dict[str, Step], rows: int) -> dict[str, float]:
    """Median milliseconds of a step, the ways in turns."""
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for round_idx in range(REPEAT + 1):
        for way, step in ways.items():
            started = time.perf_counter()
            step(range(rows))
            if round_idx:
                taken[way].append((time.perf_counter() - started) * 1e3)
    return {"rows": rows, **{way: statistics.median(each) for way, each in taken.items()}}


def compile_apart(options: argparse.Namespace, dtype: str, way: str, cache: str) -> dict[str, dict]:
    """What `sweep` says in a fresh process, with an empty cache and with a full one."""
    command = [sys.executable, __file__, "--sweep", way, "--dtype", dtype, "--model", str(options.model)]
    found = {}
    for state in ("cold", "warm"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"compiling {way} in {dtype} failed:\n{run.stderr[-2000:]}")
        found[state] = json.loads(run.stdout.splitlines()[-1])
    return found


def measure(options: argparse.Namespace, dtype: str, ways: list[str], cache: str) -> dict[str, object]:
    """Everything in one dtype."""
    apart = {way: compile_apart(options, dtype, way, f"{cache}/{dtype}-{way}") for way in ways if way in COMPILED}
    steps = Steps(load_model(options.model, dtype, progress=False)[0])
    functions = {way: steps_of(steps, way) for way in ways}
    swept = {}
    for way, step in functions.items():  # generates here what the fresh processes did, from their caches
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/{dtype}-{way}"
        swept[way] = sweep(step)
    exact = {way: differing(step) for way, step in functions.items()}
    with mock.patch.object(ops, "min_rows", lambda *_: 1):
        exact["control"] = differing(steps.eager)
    timed = [times(functions, int(rows)) for rows in options.rows.split(",")]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/{dtype}-chains"
    compiled = Chains().call
    chains = {rows: chain_times(steps, compiled, int(rows)) for rows in options.rows.split(",")} if apart else {}
    order = {}
    for way in apart:
        before, order[way] = graphs(), other_order(functions[way], steps_of(steps, way))
        order[way]["graphs"] = graphs() - before
    return {
        "dtype": dtype,
        "compile": apart,
        "sweep": swept,
        "exact": exact,
        "order": order,
        "times": timed,
        "chains": chains,
    }


def blocks_of(options: argparse.Namespace, dtype: str) -> list[dict]:
    """What `run_blocks` says in one dtype."""
    steps = Steps(load_model(options.model, dtype, progress=False)[0])
    layers, rows = ([int(part) for part in text.split(",")] for text in (options.blocks, options.rows))
    return run_blocks(steps, layers, rows, REPEAT, options.trace_only)


def report(result: dict, ways: list[str]) -> None:
    """The tables of one dtype."""
    print(f"\n{result['dtype']}: ms of a step\n{'rows':>5}" + "".join(f" {way:>8}" for way in ways)
          + "".join(f" {'eager/' + way:>13}" for way in ways[1:]))  # fmt: skip
    for r in result["times"]:
        print(f"{r['rows']:5}" + "".join(f" {r[way]:8.2f}" for way in ways)
              + "".join(f" {r['eager'] / r[way]:13.2f}" for way in ways[1:]))  # fmt: skip
    for rows, chains in result["chains"].items():
        for where in ("loop", "step"):
            pairs = {name: each[where] for name, each in chains.items() if where in each}
            parts = (f"{name} {eager:.0f}/{fast:.0f}" for name, (eager, fast) in pairs.items())
            print(f"{rows:>5} rows, µs of a chain in a {where}, eager/compiled: " + ", ".join(parts))
    for way in ways:
        exact = result["exact"][way]
        line = f"{way}: {exact['differing']} of {exact['compared']} rows differ from the row alone"
        if exact["by_count"]:
            line += " (rows: differing) " + ", ".join(f"{k}: {v}" for k, v in exact["by_count"].items())
        if way in result["compile"]:
            cold, warm = result["compile"][way]["cold"], result["compile"][way]["warm"]
            line += f"; {cold['total']} graphs (rows: new graphs) "
            line += ", ".join(f"{count}: {new}" for count, new in cold["graphs"].items())
            line += f", {cold['on_the_way_back']} on the way back; compiled in {cold['seconds']:.0f} s, "
            line += f"from the cache in {warm['seconds']:.0f} s; "
            order = result["order"][way]
            line += f"compiled from 128 rows down: {order['graphs']} graphs, "
            line += f"{order['differing']} of {order['compared']} rows get other bits"
        print(line)
    control = result["exact"]["control"]
    print(f"control, eager without padded products: {control['differing']} of {control['compared']} rows differ")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--rows", default="1,8,32,128")
    parser.add_argument("--ways", default=",".join(WAYS), help="of eager, chains, padded, native")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sweep", choices=COMPILED, help="only compile this way and say how long it took")
    parser.add_argument("--blocks", help="whole blocks of these layers instead")
    parser.add_argument("--trace-only", action="store_true", help="with --blocks: count graphs, generate no code")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = 64  # a function's graphs; after them, torch would run it eagerly
    with torch.inference_mode(), tempfile.TemporaryDirectory() as cache:
        if options.sweep:
            steps = Steps(load_model(options.model, options.dtype, progress=False)[0])
            print(json.dumps(sweep(steps_of(steps, options.sweep))))
            return
        results, ways = [], options.ways.split(",")
        for dtype in options.dtype.split(","):
            if options.blocks:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/blocks"
                results += blocks_of(options, dtype)
                continue
            results.append(measure(options, dtype, ways, cache))
            report(results[-1], ways)
    print(json.dumps({"torch": torch.__version__, "threads": options.threads, "results": results}))


if __name__ == "__main__":
    main()
