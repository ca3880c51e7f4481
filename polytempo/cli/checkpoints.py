"""`polytempo inspect` and `polytempo export`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from polytempo.cli.options import DTYPES
from polytempo.errors import CheckpointError


@click.command("inspect")
@click.argument("path", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option("--rows", type=int, default=1, show_default=True, help="Sequences to run at once, for the memory needed.")
@click.option("--context", type=int, help="Positions of each [default: all that the model allows].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def inspect_command(ctx: click.Context, path: Path | None, rows: int, context: int | None, as_json: bool) -> None:
    """Describe a checkpoint from its headers: layers, sizes, memory needed, what is missing or unexpected.

    Reads no weights. Exits with 1 if the checkpoint cannot be loaded. Without DIR, the demo model.

    \b
    Example:
      polytempo inspect path/to/checkpoint --rows 32 --context 8192
    """
    from polytempo.checkpoint.inspect import inspect_checkpoint

    inspection = inspect_checkpoint(_or_demo(path), rows, context)
    click.echo(json.dumps(inspection.to_dict(), indent=2, default=str) if as_json else str(inspection))
    if inspection.report.problems:
        ctx.exit(1)


@click.command("export")
@click.argument("path", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option("--to", "form", type=click.Choice(["official", "huggingface"]), required=True, help="Form to write.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to make.")
@click.option(
    "--quantise", "--quantize", "quantise", type=click.Choice(["none", "fp8", "fp8-fp4"]), default="none",
    show_default=True, help="Official form only; fp8-fp4 is what the official checkpoints hold.",
)  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Of unquantised weights.")
@click.option("--force", is_flag=True, help="Let --out be a directory that is not empty.")
def export_command(path: Path | None, form: str, out: Path, quantise: str, dtype: str, force: bool) -> None:
    """Write a checkpoint in either form, with its tokenizer; everything appears at once, when it is whole.

    Without --quantise every weight keeps its bits. Without DIR, the demo model.

    \b
    Examples:
      polytempo export path/to/checkpoint --to huggingface --out converted
      polytempo export path/to/checkpoint --to official --quantise fp8-fp4 --out small
    """
    from polytempo.checkpoint import export_model, load_model
    from polytempo.checkpoint.config_out import config_to_dict
    from polytempo.config import ModelConfig

    source = _or_demo(path)
    # What can be refused is refused before weights are read.
    config_to_dict(ModelConfig.from_dir(source), form, "float32", quantise)
    if out.exists() and out.resolve() == source.resolve():
        raise CheckpointError(f"{out}: is the checkpoint itself; choose another directory")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise CheckpointError(f"{out}: is not empty; choose another directory or pass --force")
    model, report = load_model(source, dtype)
    tokenizer_dir = source if (source / "tokenizer.json").is_file() else None
    export_model(model, out, form, quantise, tokenizer_dir, overwrite=force)
    for note in report.notes:
        click.echo(f"note: {note}", err=True)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    click.echo(f"wrote {out}: {form} form, quantisation {quantise}, {size / 2**20:.1f} MiB of weights", err=True)


def _or_demo(path: Path | None) -> Path:
    if path is not None:
        return path
    from polytempo.llm import DEMO_MODEL

    return DEMO_MODEL
