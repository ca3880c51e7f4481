"""`polytempo chat`: a conversation in the terminal, or over a pipe, one message per line."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import click

from polytempo.cli.options import given_sampling, model_options, open_llm, sampling_options
from polytempo.errors import RequestError
from polytempo.types import FinishReason, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from polytempo.llm import LLM

DEFAULT_MAX_TOKENS = 512
_HELP = "/reset begins a new conversation, /exit quits (so does Ctrl-D), Ctrl-C stops a reply"


@click.command("chat")
@click.option("--system", metavar="TEXT", help="System message that begins the conversation.")
@model_options(rows=False)
@sampling_options(single=True)
def chat_command(system: str | None, model: str | None, dtype: str, device: str, **options: Any) -> None:
    """Talk with a model; replies appear as they are made. --max-tokens is 512 here unless given.

    /reset begins a new conversation, /exit quits. Ctrl-C stops a reply, Ctrl-D quits. Reads from a pipe too,
    one message per line. The demo model completes Python code; it cannot hold a conversation.

    \b
    Examples:
      polytempo chat --model path/to/checkpoint --temperature 0.6 --top-p 0.95
      printf 'def add(a, b):\\n' | polytempo chat --temperature 0 --max-tokens 32
    """  # noqa: D301
    params = SamplingParams.from_dict({"max_tokens": DEFAULT_MAX_TOKENS, **given_sampling(options)})
    llm = open_llm(model, dtype, device, {**options, "max_rows": 1})
    Conversation(llm, params, system).run()


class Conversation:
    """Messages so far, and the loop that extends them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        if llm.tokenizer is None:
            raise RequestError("chat needs a tokenizer, and the model directory has no tokenizer.json")
        self.llm, self.params, self.system = llm, params, system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def run(self) -> None:
        """Read messages until the input ends or /exit."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            click.echo(_HELP, err=True)
        while (line := _read_line(is_terminal)) is not None:
            text = line.strip()
            if text == "/exit":
                return
            if text == "/reset":
                self.reset()
                click.echo("new conversation", err=True)
            elif re.fullmatch(r"/\w+", text):
                click.echo(f"unknown command {text}; {_HELP}", err=True)
            elif text:
                self.answer(line)

    def answer(self, text: str) -> None:
        """Print the reply to one message and remember both; a message that cannot be served is forgotten."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.llm.tokenizer.apply_chat_template(messages)
        limit = self.llm.engine.config.max_model_len
        if len(ids) >= limit:
            click.echo(
                f"the conversation would have {len(ids)} tokens and the context holds {limit}, reply included; this "
                "message was not sent. /reset begins a new conversation, --max-model-len sets a larger context",
                err=True,
            )
            return
        reply: list[str] = []
        note = ""
        try:
            output = _print_stream(self.llm.stream({"prompt_token_ids": ids}, self.params), reply)
            if output.outputs[0].finish_reason is FinishReason.LENGTH:
                num_tokens = output.num_prompt_tokens + output.num_output_tokens
                why = "the context is full; /reset begins a new conversation" if num_tokens >= limit else "--max-tokens"
                note = f"[cut after {output.num_output_tokens} tokens: {why}]"
        except KeyboardInterrupt:
            note = "[stopped]"
        except RequestError as error:
            click.echo(f"\nError: {error}", err=True)
            return
        click.echo()
        if note:
            click.echo(note, err=True)
        self.messages = [*messages, {"role": "assistant", "content": "".join(reply)}]


def _print_stream(pieces: Generator[str, None, RequestOutput], reply: list[str]) -> RequestOutput:
    """Print pieces as they come, collecting them in `reply`; returns the whole output."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            return end.value
        click.echo(piece, nl=False)
        reply.append(piece)


def _read_line(is_terminal: bool) -> str | None:
    """One message, None at the end of the input."""
    if not is_terminal:
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None
    try:
        import readline  # noqa: F401  (line editing, where the platform has it)
    except ImportError:
        pass
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D or /exit quits)", err=True)
        except EOFError:
            click.echo()
            return None
