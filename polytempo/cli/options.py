"""Options that several commands share: which model, what limits, how to sample."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from polytempo.engine_config import KERNELS, WEIGHTS

if TYPE_CHECKING:
    from polytempo.llm import LLM

Command = Callable[..., Any]

DTYPES = ("auto", "float32", "bfloat16")
ENGINE_OPTIONS = (
    "max_rows", "max_model_len", "max_chunk", "max_step_tokens", "speculate", "draft_len", "kv_advance", "kv_layout",
    "memory", "prefix_cache", "queue_limit", "mixed_prompt_tokens", "kernels",
)  # fmt: skip


class _IntegerOr(click.ParamType):
    """An integer, or one word."""

    def __init__(self, word: str) -> None:
        self.word, self.name = word, f"integer|{word}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if isinstance(value, int) or value == self.word:
            return value
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither an integer nor {self.word!r}", param, ctx)


class Size(click.ParamType):
    """A number of bytes, with or without a unit."""

    name = "size"
    units = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        if match is None or match[2] not in self.units:
            self.fail(f"{value!r} is not a size such as 512MiB or 4GB", param, ctx)
        return int(float(match[1]) * self.units[match[2]])


class _Bias(click.ParamType):
    """TOKEN_ID=BIAS."""

    name = "id=bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        token_id, _, bias = value.partition("=")
        try:
            return int(token_id), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not TOKEN_ID=BIAS, for example 42=-100", param, ctx)


def device_option() -> Callable[[Command], Command]:
    """--device."""
    text = "Where to run: cpu, cuda, cuda:1, …; auto is cuda where there is one."
    return click.option("--device", metavar="DEVICE", default="cpu", show_default=True, help=text)


def model_options(engine: bool = True, rows: bool = True) -> Callable[[Command], Command]:
    """Add --model, --dtype and --device.

    Args:
        engine: add the engine's limits too.
        rows: whether max_rows and what bounds many rows are among them.

    Returns:
        A decorator for a click command.
    """
    options = [
        click.option("--model", metavar="DIR", help="Checkpoint directory [default: the demo model]."),
        click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Of the weights."),
        device_option(),
    ]
    if engine:
        options += [
            click.option("--max-model-len", type=int, help="Most tokens of a sequence, prompt too [default: 4096]."),
            click.option("--max-chunk", type=int, help="Most prompt tokens of a row per step [default: 256]."),
            click.option(
                "--speculate",
                type=click.Choice(("auto", "mtp", "none")),
                help="Draft with the MTP block; never changes the output [default: auto, if there is one].",
            ),
            click.option("--draft-len", type=_IntegerOr("auto"), help="Drafts per step [default: auto, what pays]."),
            click.option(
                "--weights",
                type=click.Choice(WEIGHTS),
                help="Expand quantised weights to --dtype, keep them as stored, or what is faster [default: auto].",
            ),
            click.option(
                "--kernels",
                type=click.Choice(KERNELS),
                help="What runs the forward: C++ (native), Triton or torch [default: auto, torch where neither runs].",
            ),
        ]
    if engine and rows:
        options += [
            click.option("--max-rows", type=int, help="Sequences that run at once [default: 32]."),
            click.option("--max-step-tokens", type=int, help="Most tokens of all rows per step [default: 1024]."),
            click.option(
                "--kv-advance",
                type=click.Choice(("per_sequence", "cohort")),
                help="Rows advance each by their own count, or all by the least [default: per_sequence].",
            ),
            click.option("--memory", type=Size(), help="Most for all rows' state, such as 2GiB [default: no bound]."),
            click.option("--prefix-cache", type=Size(), help="Most for state kept to be reused [default: 0, off]."),
            click.option(
                "--kv-layout",
                type=click.Choice(("ring", "left_aligned")),
                help="How raw keys lie; left_aligned is a baseline, not exact in a batch [default: ring].",
            ),
        ]
    return _all(options)


# Field of SamplingParams, declaration, help. Defaults are the fields' own: an option that is not given is not passed.
_SAMPLING: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--max-tokens",), {"type": _IntegerOr("none"), "help": "Most output; 'none' fills the context [default: 16]."}),
    (("--min-tokens",), {"type": int, "help": "Output tokens before anything may end it [default: 0]."}),
    (("--temperature",), {"type": float, "help": "0 is greedy [default: 1]."}),
    (("--top-k",), {"type": int, "help": "Keep the k most likely tokens; 0 is off [default: 0]."}),
    (("--top-p",), {"type": float, "help": "Keep the likeliest tokens of this joint probability [default: 1]."}),
    (("--min-p",), {"type": float, "help": "Keep tokens this likely relative to the likeliest [default: 0]."}),
    (("--seed",), {"type": int, "help": "Same seed, same output, in any batch [default: a fresh one]."}),
    (("--n",), {"type": int, "help": "Outputs per prompt [default: 1]."}),
    (("--stop",), {"multiple": True, "metavar": "TEXT", "help": "End at this text; repeatable."}),
    (("stop_token_ids", "--stop-token-id"), {"multiple": True, "type": int, "help": "End at this id; repeatable."}),
    (("include_stop_str_in_output", "--include-stop"), {"is_flag": True, "help": "Keep the stop in the text."}),
    (("--ignore-eos",), {"is_flag": True, "help": "Do not end at EOS."}),
    (("--repetition-penalty",), {"type": float, "help": "Against tokens of prompt and output [default: 1, off]."}),
    (("--presence-penalty",), {"type": float, "help": "Against tokens of the output [default: 0]."}),
    (("--frequency-penalty",), {"type": float, "help": "The same, per occurrence [default: 0]."}),
    (("--logit-bias",), {"multiple": True, "type": _Bias(), "help": "Add to a token's logit; repeatable."}),
    (("allowed_token_ids", "--allowed-token-id"), {"multiple": True, "type": int, "help": "Draw only these."}),
    (("bad_words", "--bad-word"), {"multiple": True, "metavar": "TEXT", "help": "Never complete this; repeatable."}),
    (("--regex",), {"metavar": "REGEX", "help": "The whole output must match this."}),
    (("--grammar",), {"metavar": "LARK", "help": "The output must be a sentence of this grammar."}),
    (("--json-schema",), {"metavar": "JSON", "help": "The output must be JSON of this schema."}),
    (("--json-object",), {"is_flag": True, "help": "The output must be a JSON object."}),
)  # fmt: skip
_REPORTING: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--logprobs",), {"type": int, "help": "Log-probabilities: the chosen token's and so many of the top."}),
    (("--prompt-logprobs",), {"type": int, "help": "The same for the prompt; shown with --json and --out."}),
)
_ONE_ONLY = ("--n",)


def sampling_options(single: bool = False) -> Callable[[Command], Command]:
    """Add an option for each field of SamplingParams; `single` leaves out those for many outputs and reports."""
    declared = [item for item in _SAMPLING if not (single and item[0][0] in _ONE_ONLY)]
    if not single:
        declared += _REPORTING
    return _all([click.option(*names, **settings) for names, settings in declared])


def _all(options: list[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def given_sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling options that were given, by field of SamplingParams.

    Args:
        options: every option of the command.

    Returns:
        What to pass to SamplingParams; "none" has become None.
    """
    from dataclasses import fields

    from polytempo.types import SamplingParams

    names = {field.name for field in fields(SamplingParams)} & (options.keys() - set(ENGINE_OPTIONS))
    # 0 is a value that was given, though it equals False.
    given = {name: options[name] for name in names if options[name] not in (None, ()) and options[name] is not False}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return {name: None if value == "none" and name == "max_tokens" else value for name, value in given.items()}


def open_llm(model: str | None, dtype: str, device: str, limits: Mapping[str, Any]) -> LLM:
    """Load a model; progress goes to stderr if that is a terminal.

    Args:
        model: checkpoint directory, None for the demo model.
        dtype: as for LLM.
        device: as for LLM.
        limits: engine options and `weights`; None is the default, other options are ignored.

    Returns:
        The LLM.

    Raises:
        ConfigError: the device cannot be used, or a limit is out of range.
        CheckpointError: the checkpoint is broken.
    """
    from polytempo.llm import LLM

    weights = limits.get("weights") or WEIGHTS[0]
    options = {name: limits[name] for name in ENGINE_OPTIONS if name in limits}
    return LLM(model, dtype, device, weights=weights, **options)
