"""`polytempo bench`: decode throughput of several modes in one run, tokens compared."""

from __future__ import annotations

import json
from pathlib import Path

import click

from polytempo.config import KERNELS


def _integers(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a comma-separated list of integers, such as 1,8,32") from None
    if not numbers or min(numbers) < (0 if param.name == "draft_lens" else 1):
        raise click.BadParameter(f"{value!r} holds a number that is too small")
    return numbers


@click.command("bench")
@click.option("--model", "model_dir", type=click.Path(path_type=Path), help="Checkpoint directory.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32 or bfloat16.")
@click.option("-b", "--batch", "batches", default="1,8,32", show_default=True, callback=_integers, help="Rows.")
@click.option("--draft-lens", default="0,1,3", show_default=True, callback=_integers, help="0 does not speculate.")
@click.option("--cohort", is_flag=True, help="Measure the cohort advance too.")
@click.option("--prompt-lens", default="32,200,64,400", show_default=True, callback=_integers, help="Mix, in turn.")
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(2), help="Output tokens per row.")
@click.option("--scripted-acceptance", type=click.FloatRange(0, 1), help="Drafts right with this probability.")
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(1), help="Runs; the median counts.")
@click.option("--threads", type=click.IntRange(1), help="Torch threads.")
@click.option("--kernels", type=click.Choice(KERNELS), default="auto", show_default=True, help="C++ or torch.")
@click.option("--seed", default=0, show_default=True, help="Which prompts.")
@click.option("--out", "out_dir", type=click.Path(path_type=Path), help="Write bench.json and plots here.")
def bench_command(out_dir: Path | None, **options: object) -> None:
    """Measure decode throughput; every mode decodes the same prompts, and their tokens must be equal.

    Only steps in which every row decodes are timed. The last line of output is JSON.
    """
    from polytempo.bench.report import disagreements, plot, summary, table, to_json
    from polytempo.bench.suite import Suite, run_suite

    measurements = run_suite(Suite(**options))
    click.echo(table(measurements))
    wrong = disagreements(measurements)
    click.echo("\n".join(wrong) if wrong else "all modes emitted the same tokens")
    if out_dir is not None:
        for path in plot(measurements, out_dir):
            click.echo(f"wrote {path}")
        (out_dir / "bench.json").write_text(json.dumps(to_json(measurements)) + "\n")
    click.echo(json.dumps({"same_tokens": not wrong, "results": [summary(m) for m in measurements]}))
    if wrong:
        raise SystemExit(1)
