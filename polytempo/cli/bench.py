"""`polytempo bench`: decode throughput of several modes in one run, tokens compared."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polytempo.cli.options import DTYPES, WEIGHTS, device_option
from polytempo.engine_config import KERNELS

if TYPE_CHECKING:
    from polytempo.bench.load import Load


class _List(click.ParamType):
    """Comma-separated integers of at least `least`, words among `words`, or both."""

    def __init__(self, least: int | None = 1, words: Sequence[str] = ()) -> None:
        self.least, self.words = least, words
        self.name = "list"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int | str]:
        if not isinstance(value, str) or not value:
            return value
        return [self._one(part.strip(), param, ctx) for part in value.split(",")]

    def _one(self, part: str, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if part in self.words:
            return part
        known = [f"an integer of at least {self.least}"] if self.least is not None else []
        known += map(repr, self.words)
        try:
            number = int(part)
        except ValueError:
            number = None
        if number is None or self.least is None or number < self.least:
            self.fail(f"{part!r} is not {' or '.join(known)}", param, ctx)
        return number


class _Rates(click.ParamType):
    """Comma-separated numbers above 0."""

    name = "list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        if not isinstance(value, str):
            return value
        rates = []
        for part in filter(None, value.split(",")):
            try:
                rates.append(float(part))
            except ValueError:
                rates.append(math.nan)
            if not 0 < rates[-1] < math.inf:
                self.fail(f"{part!r} is not a number above 0", param, ctx)
        return rates


@click.command("bench")
@click.option("--model", "model_dir", type=click.Path(path_type=Path), help="Checkpoint directory.")
@click.option("--dtype", "dtypes", default="auto", show_default=True, type=_List(None, DTYPES), help="Of the weights.")
@device_option()
@click.option("-b", "--batch", "batches", default="1,8,32", show_default=True, type=_List(), help="Rows.")
@click.option(
    "--draft-lens", default="0,1,3,auto", show_default=True, type=_List(0, ("auto",)), help="0 does not speculate."
)
@click.option(
    "--kv-advance", "kv_advances", default="per_sequence", show_default=True,
    type=_List(None, ("per_sequence", "cohort")), help="How far rows advance.",
)
@click.option(
    "--kv-layout", "kv_layouts", default="ring", show_default=True, type=_List(None, ("ring", "left_aligned")),
    help="How raw keys lie.",
)
@click.option("--prompt-lens", default="32,200,64,400", show_default=True, type=_List(), help="Mix, in turn.")
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(2), help="Output tokens per row.")
@click.option("--scripted-acceptance", type=click.FloatRange(0, 1), help="Drafts right with this probability.")
@click.option("--rounds", default=1, show_default=True, type=click.IntRange(1), help="Batches, one after another.")
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(1), help="Runs; the median counts.")
@click.option("--threads", default="", type=_List(), help="Torch threads [default: as torch chooses].")
@click.option("--kernels", type=click.Choice(KERNELS), default="auto", show_default=True, help="Who computes.")
@click.option("--weights", type=click.Choice(WEIGHTS), default="auto", show_default=True, help="As for generate.")
@click.option("--seed", default=0, show_default=True, help="Which prompts.")
@click.option("--profile", "is_profile", is_flag=True, help="Show where a step's time goes instead.")
@click.option("--server", metavar="URL", help="Measure a running server instead: latencies as clients see them.")
@click.option("--clients", default="8", show_default=True, type=_List(), help="With --server: at once; runs, in turn.")
@click.option(
    "--rates", default="", type=_Rates(), help="With --server: requests per second, in turn, in place of --clients."
)
@click.option("--requests", default=64, show_default=True, type=click.IntRange(1), help="With --server: of each run.")
@click.option("--api-key", envvar="POLYTEMPO_API_KEY", help="With --server: its key.")
@click.option("--out", "out_dir", type=click.Path(path_type=Path), help="Where JSON and plots go.")
def bench_command(out_dir: Path | None, server: str | None, clients: list[int], rates: list[float], requests: int,
                  api_key: str | None, **options: object) -> None:  # fmt: skip
    """Measure decode throughput; every mode decodes the same prompts, and their tokens must be equal.

    Options that take a list are crossed with one another. Only steps in which every row decodes are timed. Tokens of
    left_aligned are compared too, but may differ: its order of reduction depends on the batch. The last line of
    output is JSON. With --server URL, instead send streaming requests to an OpenAI-compatible server and report TTFT,
    TPOT and the gaps between events: percentiles, JSON, and plots of their distributions and by load.

    \b
    Examples:
      polytempo bench -b 1,8,32,128 --draft-lens 0,1,2,3,auto --repeat 3 --out results
      polytempo bench -b 1,128 --draft-lens 3 --kv-advance per_sequence,cohort --scripted-acceptance 0.8
      polytempo bench --profile -b 1,128 --draft-lens 0,3
      polytempo bench --server http://127.0.0.1:8000 --clients 1,4,16 --out results
      polytempo bench --server http://127.0.0.1:8000 --rates 0.5,1,2,4 --out results
    """  # noqa: D301
    is_profile = options.pop("is_profile")
    if server is not None:
        from polytempo.bench.load import Load

        load = Load(server, requests, prompt_lens=options["prompt_lens"], max_tokens=options["max_tokens"],
                    seed=options["seed"], api_key=api_key)  # fmt: skip
        of_clients = [replace(load, num_clients=number) for number in clients]
        if not clients and not rates:
            raise click.UsageError("--server needs a number of --clients, or --rates")
        _measure_server([replace(load, rate=rate) for rate in rates] or of_clients, out_dir)
        return
    if is_profile:
        _profile(options, out_dir)
        return
    from polytempo.bench.report import disagreements, plot, summary, table, to_json
    from polytempo.bench.suite import Suite, run_suite

    measurements = run_suite(Suite(**options))
    click.echo(f"device: {measurements[0].device}")
    click.echo(table(measurements))
    wrong, notes = disagreements(measurements)
    click.echo("\n".join(wrong) if wrong else "all modes at layout ring emitted the same tokens")
    for note in notes:
        click.echo(note)
    if out_dir is not None:
        for path in plot(measurements, out_dir):
            click.echo(f"wrote {path}")
        (out_dir / "bench.json").write_text(json.dumps(to_json(measurements)) + "\n")
    click.echo(json.dumps({"same_tokens": not wrong, "results": [summary(m) for m in measurements]}))
    if wrong:
        raise SystemExit(1)


def _measure_server(loads: Sequence[Load], out_dir: Path | None) -> None:
    from polytempo.bench.load import run_load
    from polytempo.bench.load_report import load_table, plot_loads

    results = []
    for load in loads:
        results.append(run_load(load))
        click.echo(load_table(results[-1]))
    if out_dir is not None:
        out_dir.mkdir(parents=True, exist_ok=True)
        (out_dir / "bench.json").write_text(json.dumps({"runs": results}) + "\n")
        for path in (out_dir / "bench.json", *plot_loads(results, out_dir)):
            click.echo(f"wrote {path}")
    for result in results:
        del result["requests"]
    click.echo(json.dumps({"runs": results}))


def _profile(options: dict[str, Any], out_dir: Path | None) -> None:
    from polytempo.bench.profile import profile_table
    from polytempo.bench.suite import Suite, profile_suite

    found = profile_suite(Suite(**options))
    click.echo(f"device: {found[0].device}")
    click.echo("\n\n".join(map(profile_table, found)))
    result = json.dumps({"profiles": [asdict(profile) for profile in found]})
    if out_dir is not None:
        out_dir.mkdir(parents=True, exist_ok=True)
        (out_dir / "profile.json").write_text(result + "\n")
        click.echo(f"wrote {out_dir / 'profile.json'}")
    click.echo(result)
