"""How the engine scales: curves over context, rows, drafts and prompt length, bytes of state, and loading.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/scale.py [--parts context,cache,…] [--out runs/scale] [--quick]

Rows, drafts and loading are measured on --model, by default the demo model; context, cache and prefill on --long-model,
by default random weights that are made here, in the shape of benchmarks/peers/make_checkpoint.py. Every point is the
median of REPEAT runs, with their range. scale.json is written after every part, and a PNG for each; --quick takes
two small points of everything, to see that it works. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import scale_parts as parts
import torch

from polytempo import LLM
from polytempo.llm import DEMO_MODEL

REPEAT = 5
ACCEPTANCE = 0.8


@dataclass(frozen=True)
class Sizes:
    """Points of every part."""

    contexts: tuple[int, ...] = (256, 1_024, 4_096, 16_384, 65_536)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    draft_lens: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    prompt_lens: tuple[int, ...] = (256, 2_048, 16_384)
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    max_tokens: int = 32
    repeat: int = REPEAT


QUICK = Sizes((128, 256), (1, 2), (0, 2), (64, 128), ("float32",), 12, 2)


class Bench:
    """One run of the script: models are loaded when a part first asks for them.

    Args:
        sizes: points.
        model: checkpoint for rows, drafts and loading.
        long_model: checkpoint for the rest; None makes random weights.
    """

    def __init__(self, sizes: Sizes, model: Path, long_model: Path | None) -> None:
        self.sizes, self.model, self.long_model = sizes, model, long_model
        self._loaded: dict[str, LLM] = {}

    def short(self) -> LLM:
        """The model of rows and drafts."""
        if "short" not in self._loaded:
            self._loaded["short"] = LLM(self.model, "bfloat16", max_rows=1, max_model_len=64, progress=False)
        return self._loaded["short"]

    def long(self) -> LLM:
        """The model of contexts and prompts."""
        if "long" not in self._loaded:
            if self.long_model is None:
                from peers.make_checkpoint import random_weights

                self._loaded["long"] = LLM.from_model(random_weights(), None, max_rows=1, max_model_len=64)
            else:
                options = {"tokenizer": False, "max_rows": 1, "max_model_len": 64, "progress": False}
                self._loaded["long"] = LLM(self.long_model, "bfloat16", **options)
        return self._loaded["long"]

    def _within(self, lengths: tuple[int, ...]) -> list[int]:
        """Those that the long model has positions for; says which it has not."""
        limit = self.long().model.config.max_position_embeddings
        for length in lengths:
            if length + 2 > limit:
                print(f"{length} tokens: skipped, the model has {limit} positions")
        return [length for length in lengths if length + 2 <= limit]

    def context(self) -> dict:
        """See scale_parts."""
        return parts.context_step(self.long().model, self._within(self.sizes.contexts), self.sizes.repeat)

    def cache(self) -> dict:
        """See scale_parts."""
        return parts.cache_bytes(self.long().model, self._within(self.sizes.contexts), self.sizes.repeat)

    def batch(self) -> dict:
        """See scale_parts."""
        return parts.batch_step(self.short(), self.sizes.batches, self.sizes.max_tokens, self.sizes.repeat)

    def drafts(self) -> dict:
        """See scale_parts."""
        sizes = self.sizes
        return parts.draft_speed(self.short(), sizes.draft_lens, 2 * sizes.max_tokens, ACCEPTANCE, sizes.repeat)

    def prefill(self) -> dict:
        """See scale_parts."""
        return parts.prefill_speed(self.long(), self._within(self.sizes.prompt_lens), self.sizes.repeat)

    def loading(self) -> dict:
        """See scale_parts."""
        return parts.loading(self.model, self.sizes.dtypes, self.sizes.repeat)


def draw(axes, points: dict[str, dict], label: str, get: Callable[[dict], dict] = lambda point: point,
         color: str | None = None) -> None:  # fmt: skip
    """One line with the range of its runs."""
    figures = {int(x): get(point) for x, point in points.items()}
    low = [one["median"] - one["min"] for one in figures.values()]
    high = [one["max"] - one["median"] for one in figures.values()]
    axes.errorbar(list(figures), [one["median"] for one in figures.values()], (low, high), marker="o", capsize=3,
                  label=label, color=color)  # fmt: skip


def plot(name: str, result: dict, path: Path) -> None:
    """The picture of one part."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    if name == "context":
        draw(axes, result["step_ms"], "one row")
        axes.set(xscale="log", xlabel="tokens before", ylabel="ms per step", ylim=0, title="Decode step by context")
    elif name == "cache":
        sizes = result["bytes_per_token"]
        if sizes["resident"]:
            draw(axes, sizes["resident"], "resident")
        for kind in ("tensors", "formula"):
            axes.plot([int(x) for x in sizes[kind]], list(sizes[kind].values()), marker="x", label=kind)
        axes.set(xscale="log", yscale="log", xlabel="tokens of the row", ylabel="bytes per token",
                 title="State of one row")  # fmt: skip
    elif name == "batch":
        draw(axes, result["step_ms"], "ms per step")
        draw(axes.twinx(), result["tokens_per_second"], "tokens per second", color="tab:orange")
        axes.set(xscale="log", xlabel="rows", ylabel="ms per step", ylim=0, title="Decode step by rows")
        figure.axes[1].set(ylabel="tokens per second (orange)", ylim=0)
    elif name == "drafts":
        for kind in ("own", "scripted"):
            if kind in result:
                draw(axes, result[kind], kind, lambda point: point["tokens_per_second"])
        axes.set(xlabel="drafts per row and step", ylabel="tokens per second", ylim=0,
                 title=f"{result['rows']} rows; scripted drafts are right with {result['scripted_acceptance']}")
    elif name == "prefill":
        draw(axes, result["tokens_per_second"], "one row")
        axes.set(xscale="log", xlabel="prompt tokens", ylabel="tokens per second", ylim=0, title="Prefill")
    else:
        places = range(len(result))
        axes.bar([place - 0.2 for place in places], [one["weight_bytes"] / 2**20 for one in result.values()], 0.4,
                 label="weights")  # fmt: skip
        axes.bar([place + 0.2 for place in places], [one["peak_bytes"]["median"] / 2**20 for one in result.values()],
                 0.4, label="peak of loading")  # fmt: skip
        axes.set_xticks(list(places), [f"{dtype}, {one['seconds']['median']:.2f} s" for dtype, one in result.items()])
        axes.set(ylabel="MiB", title="Loading")
    if name != "batch":
        axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def show(name: str, result: dict, prefix: str = "") -> None:
    """Print every figure of a part, a line each."""
    for key, value in result.items():
        if isinstance(value, dict) and "median" in value:
            print(f"{name:<9}{prefix}{key:>7}: {value['median']:10.2f}  ({value['min']:.2f} to {value['max']:.2f})")
        elif isinstance(value, dict):
            show(name, value, f"{prefix}{key} ")
        else:
            print(f"{name:<9}{prefix}{key:>7}: {value if not isinstance(value, float) else round(value, 2)}")


PARTS = ("context", "cache", "batch", "drafts", "prefill", "loading")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--long-model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/scale"))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    chosen = options.parts.split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"unknown parts {unknown}; known: {', '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(QUICK if options.quick else Sizes(), options.model, options.long_model)
    record: dict[str, object] = {"machine": parts.machine(torch.get_num_threads())}
    for name in chosen:
        started = time.monotonic()
        result = getattr(bench, name)()
        record[name] = {**result, "part_seconds": round(time.monotonic() - started, 1)}
        show(name, record[name])
        plot(name, result, options.out / f"{name}.png")
        (options.out / "scale.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
