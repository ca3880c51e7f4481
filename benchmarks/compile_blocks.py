"""What compile.py --blocks measures: a whole block under torch.compile, and what keeps it from being one graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
import torch.fx.experimental._config as shape_config
from compile_parts import MOST_ROWS, Steps, differ, kind
from torch import Tensor
from torch._dynamo.utils import counters

from polytempo.model.deepseek_v4 import Block
from polytempo.model.moe import Experts

CONTEXTS = (128, 192, 256, 320, 384, 448, 512)
ROWS = (1, 2, 3, 8, 15, 16, 17, 32, 64, 128)
DISPATCHES = 6  # batches whose experts are counted


class OneBlock:
    """A block of the model over seeded streams, with what its attention sees.

    Args:
        steps: model and state.
        layer: which block.
        backend: of torch.compile; None for eager.
    """

    def __init__(self, steps: Steps, layer: int, backend: str | None) -> None:
        self.steps, self.layer, self.block = steps, layer, steps.torch.layers[layer]
        shape = (MOST_ROWS, steps.torch.config.hc_mult, steps.torch.config.hidden_size)
        self.streams = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(steps.torch.dtype)
        self.call = Block.forward if backend is None else torch.compile(Block.forward, backend=backend, dynamic=True)

    def run(self, rows: range, **position: int) -> Tensor:
        """The block's output streams of these rows."""
        view = self.steps.view(rows, **position)
        streams = self.streams[rows.start : rows.stop]
        return self.call(self.block, streams, view.token_ids, self.steps.attend(view, self.layer))

    def seconds(self, rows: int) -> float:
        """Of one run."""
        started = time.perf_counter()
        self.run(range(rows))
        return time.perf_counter() - started


@contextmanager
def experts_outside() -> Iterator[None]:
    """While open, the experts' dispatch runs in eager torch: it cuts tokens by counts that it reads on the host."""
    with mock.patch.object(Experts, "forward", torch.compiler.disable(Experts.forward)):
        yield


def restart() -> None:
    """Forget all graphs and counts."""
    torch._dynamo.reset()
    counters.clear()


def breaks() -> list[str]:
    """Why graphs were cut, a line each."""
    found = []
    for reason, count in counters["graph_break"].items():
        lines = [line.strip() for line in reason.splitlines() if line.strip()]
        detail = next((line for line in lines if line.startswith("Developer debug context")), "")
        found.append(f"{count}: {lines[0]}; {detail}"[:160])
    return found


def structure(steps: Steps, layer: int) -> dict[str, object]:
    """Graphs and breaks as rows come and go and as rows grow; nothing is generated, and Sinkhorn is cut short."""
    block = steps.torch.layers[layer]
    sites, found = (block.hc_attn, block.hc_ffn), {}
    rounds = [site.iterations for site in sites]
    for site in sites:
        site.iterations = 2  # traced in seconds; the guards are the same
    try:
        restart()
        with experts_outside():
            one = OneBlock(steps, layer, "eager")
            found["rows"] = [_graphs_of(lambda n=n: one.run(range(n))) for n in (*ROWS, *reversed(ROWS))]
            found["breaks"] = breaks()
            restart()
            one = OneBlock(steps, layer, "eager")
            found["contexts"] = [_graphs_of(lambda c=c: one.run(range(32), context=c)) for c in CONTEXTS]
        restart()
        one = OneBlock(steps, layer, "eager")
        runs = range(0, 8 * DISPATCHES, 8)
        found["dispatch"] = [_graphs_of(lambda f=first: one.run(range(f, f + 8))) for first in runs]
        found["breaks_inside"] = breaks()
    finally:
        for site, count in zip(sites, rounds, strict=True):
            site.iterations = count
    return found


def _graphs_of(run) -> int:
    before = counters["stats"]["unique_graphs"]
    run()
    return counters["stats"]["unique_graphs"] - before


def measure_block(steps: Steps, layer: int, rows: Sequence[int], repeat: int) -> dict[str, object]:
    """Compile one block with the experts outside: seconds, graphs, milliseconds, and rows that are not exact."""
    restart()
    with experts_outside():
        plain, compiled = OneBlock(steps, layer, None), OneBlock(steps, layer, "inductor")
        first = {count: compiled.seconds(count) for count in rows}
        graphs, timed = counters["stats"]["unique_graphs"], []
        for count in rows:
            pairs = [(plain.seconds(count), compiled.seconds(count)) for _ in range(repeat)]
            eager, fast = (statistics.median(each) * 1e3 for each in zip(*pairs, strict=True))
            timed.append({"rows": count, "eager": eager, "compiled": fast})
        alone = torch.cat([compiled.run(range(row, row + 1)) for row in range(MOST_ROWS)])
        compared = differing = 0
        for count in rows:
            for start in sorted({0, MOST_ROWS - count}):
                got = compiled.run(range(start, start + count))
                differing += differ(got, alone[start : start + count])
                compared += count
    return {"seconds": first, "graphs": graphs, "times": timed, "compared": compared, "differing": differing}


def report_block(result: dict) -> None:
    """A block's lines."""
    parts, timed = result["structure"], result["compiled"]
    print(f"\nblock {result['layer']} ({result['kind']}), {result['dtype']}, the experts' dispatch outside")
    print(f"graphs at rows {', '.join(map(str, ROWS))} and back: {parts['rows']}")
    print(f"graphs at 32 rows as contexts grow, {', '.join(map(str, CONTEXTS))}: {parts['contexts']}")
    print(f"graphs with the dispatch inside, {DISPATCHES} batches of 8 rows: {parts['dispatch']}")
    for name, lines in (("outside", parts["breaks"]), ("inside", parts["breaks_inside"])):
        print(f"breaks with the dispatch {name}: " + (" | ".join(lines) or "none"))
    if timed is None:
        return
    for r in timed["times"]:
        print(f"{r['rows']:5} rows: eager {r['eager']:.2f} ms, compiled {r['compiled']:.2f} ms, "
              f"{r['eager'] / r['compiled']:.2f} times")  # fmt: skip
    print(f"{timed['differing']} of {timed['compared']} rows differ from the row alone; {timed['graphs']} graphs, "
          f"{sum(timed['seconds'].values()):.0f} s")  # fmt: skip


def run_blocks(steps: Steps, layers: Sequence[int], rows: Sequence[int], repeat: int, trace_only: bool) -> list[dict]:
    """Measure and report each block."""
    results = []
    with shape_config.patch(use_duck_shape=False):  # else rows equal to some other size get a graph of their own
        for layer in layers:
            result = {"layer": layer, "kind": kind(steps.torch.layers[layer]), "dtype": str(steps.torch.dtype)}
            result["structure"] = structure(steps, layer)
            result["compiled"] = None if trace_only else measure_block(steps, layer, rows, repeat)
            report_block(result)
            results.append(result)
    return results
