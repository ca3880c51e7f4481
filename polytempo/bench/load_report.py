"""What `polytempo bench --server` measured: a table, and plots of latencies, by request and by load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polytempo.bench.load import PERCENTILES
from polytempo.errors import ConfigError

COLUMNS = {"ttft": "time to first token", "tpot": "time per later token", "gap": "gap between events",
           "longest_gap": "longest gap of a request"}  # fmt: skip


def load_name(result: dict[str, Any]) -> str:
    """What a run was loaded with."""
    if result["rate"] is not None:
        return f"{result['rate']:g} requests/s"
    return f"{result['num_clients']} client{'s' * (result['num_clients'] != 1)}"


def load_table(result: dict[str, Any]) -> str:
    """The percentiles, in milliseconds, and the throughput."""
    lines = [f"{load_name(result):<26}" + "".join(f"{f'p{percent}':>13}" for percent in PERCENTILES)]
    for name, title in COLUMNS.items():
        values = result[name] or {}
        lines.append(f"{title:<26}" + "".join(f"{1e3 * value:>10.1f} ms" for value in values.values()))
    lines.append(f"{result['output_tokens']} output tokens, {result['output_tokens_per_second']:.1f} per second")
    return "\n".join(lines)


def plot_loads(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Distributions of every run; and percentiles by clients or by rate, of which there are several.

    Args:
        results: of `run_load`.
        folder: where PNGs go.

    Returns:
        The files.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("the plot needs matplotlib; pip install 'polytempo[plots]'") from None
    written = [_plot_distributions(results, folder / "latency.png")]
    for key, label in (("num_clients", "clients at once"), ("rate", "requests per second")):
        runs = sorted((result for result in results if result[key] is not None), key=lambda result: result[key])
        if len(runs) > 1:
            written.append(_plot_by_load(runs, key, label, folder / f"latency_by_{key.removeprefix('num_')}.png"))
    return written


def _figure(num_axes: int) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * num_axes, 3.4), layout="constrained")
    figure.subplots(1, num_axes)
    return figure


def _plot_distributions(results: Sequence[dict[str, Any]], path: Path) -> Path:
    figure = _figure(3)
    for axes, name in zip(figure.axes, ("ttft", "tpot", "gap"), strict=True):
        for result in results:
            requests = result["requests"]
            parts = [request["gaps"] if name == "gap" else [request[name]] for request in requests]
            values = sorted(1e3 * value for part in parts for value in part if value is not None)
            shares = [(place + 1) / len(values) for place in range(len(values))]
            axes.step(values, shares, where="post", label=load_name(result))
        axes.set(xlabel=f"{COLUMNS[name]} (ms)", xlim=(0, None), ylim=(0, 1))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("share of requests")
    figure.axes[1].set_ylabel("share of requests")
    figure.axes[2].set_ylabel("share of gaps")
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)
    return path


def _plot_by_load(runs: Sequence[dict[str, Any]], key: str, label: str, path: Path) -> Path:
    figure = _figure(4)
    loads = [run[key] for run in runs]
    for axes, name in zip(figure.axes, ("ttft", "tpot", "gap"), strict=False):
        for percent in PERCENTILES:
            values = [1e3 * run[name][f"p{percent}"] if run[name] else None for run in runs]
            points = [point for point in zip(loads, values, strict=True) if point[1] is not None]
            axes.plot(*zip(*points, strict=True), marker="o", label=f"p{percent}") if points else None
        axes.set(xlabel=label, ylabel=f"{COLUMNS[name]} (ms)", ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.axes[3].plot(loads, [run["output_tokens_per_second"] for run in runs], marker="o", color="black")
    figure.axes[3].set(xlabel=label, ylabel="output tokens per second", ylim=(0, None))
    figure.axes[3].grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return path
