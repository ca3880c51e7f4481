"""Turn measurements into a table, JSON and plots."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from polytempo.bench.run import Measurement
from polytempo.errors import ConfigError

COLUMNS = ("mode", "batch", "tok/s", "step ms", "tok/forward", "mtp/step", "propose", "acceptance by place")


def summary(measurement: Measurement) -> dict:
    """Figures of one measurement as plain numbers, without the raw series."""
    steps = measurement.step_ms or [0.0]
    return {
        "mode": measurement.mode,
        "batch": measurement.batch,
        "tokens_per_second": round(measurement.tokens_per_second, 2),
        "step_ms": {
            "min": round(min(steps), 2),
            "median": round(statistics.median(steps), 2),
            "max": round(max(steps), 2),
        },
        "steps": len(measurement.step_ms),
        "tokens_per_forward": round(measurement.tokens_per_forward, 3),
        "mtp_forwards_per_step": round(measurement.mtp_forwards_per_step, 2),
        "propose_share": round(measurement.propose_seconds / measurement.seconds, 3) if measurement.seconds else 0.0,
        "acceptance": [round(share, 3) for share in measurement.acceptance],
    }


def table(measurements: Sequence[Measurement]) -> str:
    """A text table, one line per measurement."""
    rows = [COLUMNS]
    for measurement in measurements:
        figures = summary(measurement)
        rows.append((
            figures["mode"], str(figures["batch"]), f"{figures['tokens_per_second']:.1f}",
            f"{figures['step_ms']['median']:.1f}", f"{figures['tokens_per_forward']:.2f}",
            f"{figures['mtp_forwards_per_step']:.2f}", f"{figures['propose_share']:.0%}",
            " ".join(f"{share:.2f}" for share in figures["acceptance"]) or "-",
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def disagreements(measurements: Sequence[Measurement]) -> list[str]:
    """Modes whose tokens differ from the first mode's at the same batch size; empty if decoding is lossless."""
    first: dict[int, Measurement] = {}
    wrong = []
    for measurement in measurements:
        reference = first.setdefault(measurement.batch, measurement)
        rows = [place for place, pair in enumerate(zip(reference.outputs, measurement.outputs, strict=True))
                if pair[0] != pair[1]]  # fmt: skip
        if rows:
            wrong.append(f"{measurement.mode} at batch {measurement.batch}: rows {rows} differ from {reference.mode}")
    return wrong


def plot(measurements: Sequence[Measurement], out_dir: Path) -> list[Path]:
    """Write throughput.png (tok/s by batch, one line per mode) and positions.png (every row's tokens by step).

    Args:
        measurements: of any modes and batches.
        out_dir: created if absent.

    Returns:
        The files written.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plots need matplotlib; install polytempo[plots]") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    out_dir.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for mode in dict.fromkeys(measurement.mode for measurement in measurements):
        points = [(m.batch, m.tokens_per_second) for m in measurements if m.mode == mode]
        axes.plot(*zip(*points, strict=True), marker="o", label=mode)
    axes.set(xlabel="rows", ylabel="decode tokens per second, all rows", xscale="log", title="Throughput by batch")
    axes.legend()
    axes.grid(alpha=0.3)
    paths = [out_dir / "throughput.png", out_dir / "positions.png"]
    figure.tight_layout()
    figure.savefig(paths[0], dpi=110)
    widest = max(measurements, key=lambda m: (m.mtp_forwards_per_step > 0, m.batch))
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for row_idx in range(widest.batch):
        axes.plot([step[row_idx] for step in widest.positions], linewidth=0.8)
    title = f"Every row at its own pace: {widest.mode}, {widest.batch} rows"
    axes.set(xlabel="step", ylabel="tokens of the row", title=title)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(paths[1], dpi=110)
    plt.close("all")
    return paths


def to_json(measurements: Sequence[Measurement]) -> list[dict]:
    """Everything measured, raw series included, without the output tokens."""
    return [{**summary(m), "series": {k: v for k, v in asdict(m).items() if k in ("step_ms", "positions")}}
            for m in measurements]  # fmt: skip
