"""Time of a decode step against the context: one token of one row at growing positions.

    python benchmarks/context.py [--model DIR] [--contexts 256,1024,4096,16384,65536] [--rows 1] [--plot FILE]

The state before the token is filled with random numbers instead of a prefill: a step's time does not depend on their
values, but for which entries the indexer chooses. Medians of REPEAT forwards with logits. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from polytempo.cache.layout import Segment, StateShape
from polytempo.cache.store import RowStore
from polytempo.checkpoint.load import load_model
from polytempo.engine_config import EngineConfig
from polytempo.llm import DEMO_MODEL
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.forward import target_forward
from polytempo.model.rope import RopeTables

REPEAT = 15


def filled_store(model: DeepseekV4, rows: int, context: int) -> RowStore:
    """State of rows that hold `context` tokens, of random numbers."""
    limits = EngineConfig(max_rows=rows, max_model_len=context + 1, max_step_tokens=max(1024, rows))
    store = RowStore.allocate(StateShape.build(model.config, limits), rows, model.dtype)
    for slot in range(rows):
        store.pool.reserve(slot, context + 1)
    store.fit()
    for layer in (*store.layers, *store.mtp):
        tensors = [*layer.per_slot(), *(state.entries for state in layer.pooled)]
        for tensor in tensors:
            tensor.normal_()
    return store


@torch.inference_mode()
def step_ms(model: DeepseekV4, rows: int, context: int) -> float:
    """Median milliseconds of one forward of one token per row, logits included."""
    store = filled_store(model, rows, context)
    tables = RopeTables.build(model.config, context + 1)
    times = []
    for _ in range(REPEAT + 1):
        started = time.perf_counter()
        view = store.target_view([Segment(slot, context, [5]) for slot in range(rows)], model.config.compress_ratios)
        model.logits(target_forward(model, tables, store, view))
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[1:])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--contexts", default="256,1024,4096,16384,65536")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    model, _ = load_model(options.model, dtype="bfloat16", progress=False)
    limit = model.config.max_position_embeddings
    contexts = [int(part) for part in options.contexts.split(",")]
    measured = {context: round(step_ms(model, options.rows, context), 3) for context in contexts if context < limit}
    first = next(iter(measured.values()))
    for context, milliseconds in measured.items():
        print(f"{context:>7} tokens: {milliseconds:8.2f} ms, {milliseconds / first:.2f} of the first")
    for context in contexts:
        if context >= limit:
            print(f"{context:>7} tokens: skipped, the model has {limit} positions")
    if options.plot:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4.5))
        axes.plot(list(measured), list(measured.values()), marker="o")
        axes.set(xscale="log", xlabel="tokens before", ylabel="ms per step", ylim=0, title="Decode step by context")
        axes.grid(alpha=0.3)
        figure.savefig(options.plot, dpi=110)
    print(json.dumps({"rows": options.rows, "step_ms": measured}))


if __name__ == "__main__":
    main()
