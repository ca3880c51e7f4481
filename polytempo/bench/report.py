"""Turn measurements into a table, JSON and plots."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from polytempo.bench.run import Measurement
from polytempo.errors import ConfigError

COLUMNS = (
    "mode", "dtype", "threads", "batch", "tok/s", "ratio", "step ms", "tok/forward", "mtp/step", "plan", "forward",
    "verify", "propose", "acceptance by place",
)  # fmt: skip


def summary(measurement: Measurement) -> dict:
    """Figures of one measurement as plain numbers, without the raw series."""
    steps = measurement.step_ms or [0.0]
    phases, total = measurement.phases, measurement.phases.total
    return {
        "mode": measurement.mode.name,
        "device": measurement.device,
        "dtype": measurement.dtype,
        "threads": measurement.threads,
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
        "phase_shares": {name: round(seconds / (total or 1.0), 3) for name, seconds in asdict(phases).items()},
        "acceptance": [round(share, 3) for share in measurement.acceptance],
    }


def setting(measurement: Measurement) -> tuple[str, int, int]:
    """What measurements must share to be compared: dtype, threads, batch."""
    return measurement.dtype, measurement.threads, measurement.batch


def table(measurements: Sequence[Measurement]) -> str:
    """A text table, one line per measurement; ratio is tok/s over that of the first mode at the same setting."""
    rows = [COLUMNS]
    first: dict[tuple, Measurement] = {}
    for measurement in measurements:
        figures = summary(measurement)
        base = first.setdefault(setting(measurement), measurement).tokens_per_second
        ratio = measurement.tokens_per_second / base if base else 0.0
        rows.append((
            figures["mode"], figures["dtype"], str(figures["threads"]), str(figures["batch"]),
            f"{figures['tokens_per_second']:.1f}", f"{ratio:.2f}", f"{figures['step_ms']['median']:.1f}",
            f"{figures['tokens_per_forward']:.2f}", f"{figures['mtp_forwards_per_step']:.2f}",
            *(f"{share:.0%}" for share in figures["phase_shares"].values()),
            " ".join(f"{share:.2f}" for share in figures["acceptance"]) or "-",
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def equal_tokens(measurement: Measurement, reference: Measurement) -> tuple[int, int]:
    """(tokens of each row before its first difference from the reference, all tokens), summed over rows."""
    equal = 0
    for ours, theirs in zip(measurement.outputs, reference.outputs, strict=True):
        differing = (place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        equal += next(differing, len(ours))
    return equal, sum(map(len, measurement.outputs))


def disagreements(measurements: Sequence[Measurement]) -> tuple[list[str], list[str]]:
    """Compare every mode's tokens with the first mode's at the same setting.

    Args:
        measurements: as `run_suite` returns them.

    Returns:
        (faults, notes): differences of modes that promise equality, and of modes that do not (left_aligned).
    """
    first: dict[tuple, Measurement] = {}
    faults, notes = [], []
    for measurement in measurements:
        reference = first.setdefault(setting(measurement), measurement)
        equal, total = equal_tokens(measurement, reference)
        if equal < total:
            at = f"{measurement.mode.name} at batch {measurement.batch} ({measurement.dtype})"
            text = f"{at}: {equal} of {total} tokens before a first difference from {reference.mode.name}"
            (faults if measurement.mode.is_exact else notes).append(text)
    return faults, notes


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
    lines: dict[str, list[Measurement]] = {}
    for m in measurements:
        lines.setdefault(f"{m.mode.name}, {m.dtype}, {m.threads} threads", []).append(m)
    for label, points in lines.items():
        axes.plot([m.batch for m in points], [m.tokens_per_second for m in points], marker="o", label=label)
    axes.set(xlabel="rows", ylabel="decode tokens per second, all rows", xscale="log", title="Throughput by batch")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    paths = [out_dir / "throughput.png", out_dir / "positions.png"]
    figure.tight_layout()
    figure.savefig(paths[0], dpi=110)
    widest = max(measurements, key=lambda m: (m.mtp_forwards_per_step > 0, m.batch))
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for row_idx in range(widest.batch):
        axes.plot([step[row_idx] for step in widest.positions], linewidth=0.8)
    title = f"Every row at its own pace: {widest.mode.name}, {widest.batch} rows"
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
