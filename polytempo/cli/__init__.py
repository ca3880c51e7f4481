"""The command line. Torch is imported inside the commands, so that --help answers at once."""

from __future__ import annotations

import click

from polytempo import __version__
from polytempo.cli.bench import bench_command
from polytempo.cli.chat import chat_command
from polytempo.cli.checkpoints import export_command, inspect_command
from polytempo.cli.generate import generate_command
from polytempo.cli.options import model_options, open_llm
from polytempo.cli.serve import serve_command
from polytempo.errors import InvariantError, PolytempoError

__all__ = ["cli", "main"]
EXIT_INTERRUPTED = 130


class _Refusal(click.ClickException):
    """Prints `Error: …` without a traceback."""

    def __init__(self, error: PolytempoError) -> None:
        lines = str(error).splitlines() or [type(error).__name__]
        super().__init__("\n  ".join(lines))
        self.exit_code = 2
        if isinstance(error, InvariantError):
            self.exit_code = 1
            self.message += "\nThis is a bug in polytempo; `polytempo --debug …` shows where."


class _Group(click.Group):
    """Turns the package's own errors into one message and an exit code."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except PolytempoError as error:
            if ctx.params.get("debug"):
                raise
            raise _Refusal(error) from None
        except KeyboardInterrupt:
            click.echo("\nInterrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 a result is not right, 2 bad input, 130 interrupted.",
)
@click.version_option(__version__, prog_name="polytempo")
@click.option("--debug", is_flag=True, envvar="POLYTEMPO_DEBUG", help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Run models of the DeepSeek-V4 family: every sequence of a batch exactly as it would be alone.

    Without --model, commands use the small model that ships with the package.

    \b
    Examples:
      polytempo demo
      polytempo generate --prompt "def main(" --max-tokens 40
      polytempo bench -b 1,8 --draft-lens 0,2
      polytempo chat --model path/to/checkpoint
      polytempo inspect path/to/checkpoint --rows 8 --context 4096
      polytempo serve --port 8000
    """


@cli.command()
@model_options(engine=False)
@click.option("--rows", type=click.IntRange(1), default=4, show_default=True, help="Seats; 8 prompts share them.")
@click.option("--drafts", type=click.IntRange(0), default=3, show_default=True, help="Drafts per row and step.")
@click.pass_context
def demo(ctx: click.Context, model: str | None, dtype: str, device: str, rows: int, drafts: int) -> None:
    """Complete 8 prompts of very different lengths in one speculative batch, then each alone without, and compare.

    Every row advances by the drafts that it accepted plus one. (Left to itself, the engine drafts only where that is
    faster; here it always does, so that there is something to see.) Compares token ids, text, finish reason and
    log-probabilities; exits with 1 unless all are identical.
    """
    from polytempo.demo import run_demo

    if not run_demo(open_llm(model, dtype, device, {"max_rows": rows, "max_model_len": 1024, "draft_len": drafts})):
        ctx.exit(1)


for _command in (generate_command, chat_command, inspect_command, export_command, bench_command, serve_command):
    cli.add_command(_command)


def main() -> None:
    """Entry point of the `polytempo` script."""
    cli(prog_name="polytempo")
