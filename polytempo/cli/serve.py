"""`polytempo serve`: the OpenAI-compatible server."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polytempo.cli.options import model_options, open_llm
from polytempo.errors import ConfigError

if TYPE_CHECKING:
    from polytempo.llm import LLM

LOOPBACK = ("127.0.0.1", "localhost", "::1")
DEFAULT_QUEUE_LIMIT = 256
DEFAULT_MIXED_PROMPT_TOKENS = 64
DEFAULT_PREFIX_CACHE = 256 * 2**20


@click.command("serve")
@model_options()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address; 0.0.0.0 is every one.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--model-name", help="What clients call the model [default: the directory's name].")
@click.option("--api-key", envvar="POLYTEMPO_API_KEY", help="What clients must send as a bearer token.")
@click.option("--queue-limit", default=DEFAULT_QUEUE_LIMIT, show_default=True, type=click.IntRange(0),
              help="Rows that may wait for a seat; more get 429.")  # fmt: skip
@click.option("--mixed-prompt-tokens", default=DEFAULT_MIXED_PROMPT_TOKENS, show_default=True, type=click.IntRange(1),
              help="Most prompt tokens in a step in which a row decodes.")  # fmt: skip
@click.option("--step-timeout", default=120.0, show_default=True, type=click.FloatRange(0, min_open=True),
              help="Seconds after which a step counts as hung.")  # fmt: skip
@click.option("--drain-timeout", default=30.0, show_default=True, type=click.FloatRange(0),
              help="Seconds for running requests after SIGTERM.")  # fmt: skip
@click.option("--max-body-bytes", default=8 * 2**20, show_default=True, type=click.IntRange(1), help="Of a request.")
@click.option("--allow-origin", multiple=True, metavar="ORIGIN", help="Let pages of this origin call; repeatable.")
@click.option("--log-prompts", is_flag=True, help="Write prompts to the log.")
def serve_command(model: str | None, dtype: str, device: str, host: str, port: int, **options: Any) -> None:
    """Serve the OpenAI API: /v1/completions, /v1/chat/completions, and a page at / to watch and try it.

    The state of shared prompts is kept and reused: 256 MiB of it unless --prefix-cache says otherwise.
    SIGTERM or Ctrl-C lets running requests finish; a second one ends at once.

    \b
    Examples:
      polytempo serve
      polytempo serve --model path/to/checkpoint --max-rows 16 --max-model-len 8192 --port 8080
    """  # noqa: D301
    try:
        from polytempo.async_llm import AsyncLLM
        from polytempo.server.app import ServerSettings, make_app
        from polytempo.server.run import serve
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("polytempo"):
            raise
        raise ConfigError(f"serving needs the package {error.name}; pip install 'polytempo[serve]'") from None

    if options["prefix_cache"] is None and options["kv_layout"] in (None, "ring"):
        options["prefix_cache"] = DEFAULT_PREFIX_CACHE
    llm = open_llm(model, dtype, device, options)
    if llm.tokenizer is None:
        raise ConfigError(f"{model}: serving needs a tokenizer, and there is no tokenizer.json")
    settings = ServerSettings(
        model_name=options["model_name"] or ("polytempo-demo" if model is None else Path(model).resolve().name),
        api_key=options["api_key"],
        max_body_bytes=options["max_body_bytes"],
        allowed_origins=options["allow_origin"],
        logs_prompts=options["log_prompts"],
        drain_timeout=options["drain_timeout"],
    )
    click.echo(_greeting(llm, settings.model_name, host, port, options), err=True)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    serve(make_app(AsyncLLM(llm, options["step_timeout"]), settings), host, port, settings)


def _greeting(llm: LLM, name: str, host: str, port: int, options: Mapping[str, Any]) -> str:
    """What was loaded, what it will use, and the first thing to try."""
    from polytempo.cache.layout import StateShape

    model, config = llm.model, llm.engine.config
    weights = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    state, most = llm.engine.target.store.num_bytes, config.memory
    if most is None:
        most = config.max_rows * StateShape.build(model.config, config).bytes_per_row(model.dtype.itemsize)
    drafts = "none" if config.speculate == "none" or not model.config.num_mtp_blocks else f"{config.draft_len} per step"
    dtype = str(model.dtype).removeprefix("torch.")
    shown = "127.0.0.1" if host == "0.0.0.0" else f"[{host}]" if ":" in host else host
    key = "" if options["api_key"] is None else " -H 'Authorization: Bearer KEY'"
    lines = [
        f"model    {name}: {model.config.num_hidden_layers} layers, {dtype} on {model.device}, "
        f"{weights / 2**20:.0f} MiB",
        f"rows     {config.max_rows} of {config.max_model_len} tokens, {state / 2**20:.0f} MiB of state, "
        f"at most {most / 2**20:.0f}; {config.queue_limit} more may wait",
        f"prefixes {config.prefix_cache / 2**20:.0f} MiB of state to be reused",
        f"drafts   {drafts}, advance {config.kv_advance}",
        f"page     http://{shown}:{port}/",
        f"try      curl http://{shown}:{port}/v1/completions -H 'Content-Type: application/json'{key} \\",
        """           -d '{"prompt": "def main(", "max_tokens": 32, "temperature": 0}'""",
    ]
    if host not in LOOPBACK and options["api_key"] is None:
        lines.append("warning  other machines can reach this server, and no --api-key guards it")
    return "\n".join(lines)
