"""`polytempo generate`: complete prompts in one batch, print or write what came out."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polytempo.cli.options import given_sampling, model_options, open_llm, sampling_options
from polytempo.cli.prompts import PromptSource, read_prompts
from polytempo.errors import ConfigError, RequestError
from polytempo.types import CompletionOutput, FinishReason, Logprob, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from polytempo.llm import LLM

_SHOWN_PROMPT = 400  # characters of a prompt in the human output


@click.command("generate")
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt; repeatable.")
@click.option("--prompts-file", metavar="FILE", help="More prompts, txt or jsonl; '-' reads stdin.")
@click.option("--out", type=click.Path(path_type=Path), help="Write one JSON object per prompt to this file.")
@click.option("--force", is_flag=True, help="Let --out replace a file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per prompt and nothing else.")
@model_options()
@sampling_options()
@click.pass_context
def generate_command(
    ctx: click.Context, prompts: Sequence[str], prompts_file: str | None, out: Path | None, force: bool, as_json: bool,
    model: str | None, dtype: str, device: str, **options: Any,
) -> None:  # fmt: skip
    """Complete prompts, all in one batch; results come in the order of the prompts.

    A .txt file holds one prompt per line, blank lines aside. A .jsonl file holds one object per line, with one of
    "prompt", "prompt_token_ids" and "messages" (through the chat template), and optionally "params": options of
    that prompt, which win over the command line's, by the names of the Python API.

    \b
    Examples:
      polytempo generate --prompt "import os" --prompt "class Node:" --temperature 0 --max-tokens 32
      polytempo generate --prompts-file prompts.jsonl --max-rows 8 --out results.jsonl
      echo '{"prompt": "def f(x):", "params": {"stop": ["\\n\\n"]}}' | polytempo generate --prompts-file - --json
    """  # noqa: D301
    if out is not None:
        _check_out(out, force)
    sources = read_prompts(prompts, prompts_file)
    given = given_sampling(options)
    params = [_params(source, given) for source in sources]
    llm = open_llm(model, dtype, device, options)
    requests = [_checked(llm, source, one) for source, one in zip(sources, params, strict=True)]
    outputs = llm.generate(requests, params, progress=sys.stderr.isatty())
    if out is not None:
        _write(out, outputs)
    if as_json:
        for index, output in enumerate(outputs):
            click.echo(_line(index, output))
    elif out is None:
        for index, output in enumerate(outputs):
            _show(output, f"{index + 1}/{len(outputs)}")
    failed = _report_errors(sources, outputs)
    if out is not None and not as_json:
        click.echo(f"wrote {len(outputs)} results to {out}", err=True)
    if failed:
        ctx.exit(1)


def _check_out(out: Path, force: bool) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a directory; name a file")
    if out.exists() and not force:
        raise ConfigError(f"--out {out}: exists; pass --force to replace it")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: the directory {out.absolute().parent} does not exist")


def _params(source: PromptSource, given: Mapping[str, Any]) -> SamplingParams:
    try:
        return SamplingParams.from_dict({**given, **source.params})
    except RequestError as error:
        if not source.params:
            raise  # the command line's options are at fault, not this prompt
        raise RequestError(f"{source.where}: {error}") from None


def _checked(llm: LLM, source: PromptSource, params: SamplingParams) -> dict[str, Any]:
    """The prompt as LLM.generate takes it; what it would refuse is refused here, where the line is known."""
    try:
        if source.kind == "messages":
            if llm.tokenizer is None:
                raise RequestError("messages need a tokenizer, and the model directory has no tokenizer.json")
            request = {"prompt_token_ids": llm.tokenizer.apply_chat_template(source.value)}
        else:
            request = {source.kind: source.value}
        llm.check(request, params)
    except RequestError as error:
        raise RequestError(f"{source.where}: {error}") from None
    return request


def _write(out: Path, outputs: Sequence[RequestOutput]) -> None:
    """Write all results, or nothing: the file appears when it is whole."""
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.write_text("".join(_line(index, one) + "\n" for index, one in enumerate(outputs)), encoding="utf-8")
        os.replace(partial, out)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror or error})") from None
    finally:
        partial.unlink(missing_ok=True)


def _line(index: int, output: RequestOutput) -> str:
    return json.dumps(to_dict(index, output), ensure_ascii=False, allow_nan=False)


def to_dict(index: int, output: RequestOutput) -> dict[str, Any]:
    """One request's result as JSON values.

    Args:
        index: its place among the prompts, from 0.
        output: what came out.

    Returns:
        The object that --json and --out write.
    """
    result: dict[str, Any] = {
        "index": index,
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": [_choice(choice) for choice in output.outputs],
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_output_tokens": output.num_output_tokens,
        "ttft": _rounded(output.timings.ttft),
        "seconds": _rounded(output.timings.e2e),
    }
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [entry and _entry(entry) for entry in output.prompt_logprobs]
    return result


def _choice(choice: CompletionOutput) -> dict[str, Any]:
    result: dict[str, Any] = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason and str(choice.finish_reason),
        "stop_reason": choice.stop_reason,
    }
    if choice.error is not None:
        result["error"] = choice.error
    if choice.logprobs is not None:
        result["cumulative_logprob"] = _finite(choice.cumulative_logprob)
        result["logprobs"] = [_entry(entry) for entry in choice.logprobs]
    return result


def _entry(entry: Mapping[int, Logprob]) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
        for token_id, one in entry.items()
    }


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: a token of probability 0 has the log-probability null."""
    return value if value is not None and math.isfinite(value) else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _show(output: RequestOutput, place: str) -> None:
    """Print one request for people."""
    prompt = output.prompt if output.prompt is not None else f"token ids {list(output.prompt_token_ids)}"
    if len(prompt) > _SHOWN_PROMPT:
        prompt = f"… {prompt[-_SHOWN_PROMPT:]}"
    click.secho(f"[{place}] prompt, {_count(output.num_prompt_tokens)}", bold=True)
    click.echo(prompt)
    ttft, seconds = output.timings.ttft, output.timings.e2e
    times = f", first after {ttft:.2f} s, all after {seconds:.2f} s" if ttft is not None and seconds is not None else ""
    for choice in output.outputs:
        number = f" {choice.index + 1} of {len(output.outputs)}" if len(output.outputs) > 1 else ""
        stop = "" if choice.stop_reason is None else f" at {choice.stop_reason!r}"
        title = f"[{place}] output{number}, {_count(len(choice.token_ids))}, finish reason {choice.finish_reason}{stop}"
        click.secho(title + times, bold=True)
        click.echo(choice.text if choice.text or not choice.token_ids else list(choice.token_ids))
        for token_id, entry in zip(choice.token_ids, choice.logprobs or (), strict=False):
            _show_logprobs(token_id, entry)
    click.echo()


def _show_logprobs(token_id: int, entry: Mapping[int, Logprob]) -> None:
    """Print the chosen token, then the others."""
    ordered = sorted(entry.items(), key=lambda item: (item[0] != token_id, item[1].rank))
    parts = [f"{one.decoded_token!r} {one.logprob:.4f} (rank {one.rank})" for _, one in ordered]
    click.echo(f"  {token_id:>6}  {parts[0]}" + ("  of " + ", ".join(parts[1:]) if parts[1:] else ""))


def _count(num_tokens: int) -> str:
    return f"{num_tokens} token{'' if num_tokens == 1 else 's'}"


def _report_errors(sources: Sequence[PromptSource], outputs: Sequence[RequestOutput]) -> bool:
    """Name every output that failed while it ran; returns whether any did."""
    failed = False
    for source, output in zip(sources, outputs, strict=True):
        for choice in output.outputs:
            if choice.finish_reason is FinishReason.ERROR:
                click.echo(f"Error: {source.where}: {choice.error}", err=True)
                failed = True
    return failed
