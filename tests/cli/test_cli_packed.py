"""`--weights packed` of every command that runs a model, over a tiny official checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from polytempo.cli import cli
from polytempo.errors import ConfigError
from polytempo.llm import LLM
from polytempo.model.packed import PackedLinear

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from checkpoint_helpers import export_tiny  # noqa: E402

GENERATE = ("generate", "--prompts-file", "-", "--json", "--temperature", "0", "--max-tokens", "8", "--ignore-eos")
BENCH = ("bench", "-b", "1,3", "--draft-lens", "0,2", "--prompt-lens", "4,9", "--max-tokens", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(export_tiny(tmp_path_factory.mktemp("packed") / "model"))


@pytest.fixture
def started(monkeypatch):
    """Whether each LLM that a command started has packed weights."""
    seen, start = [], LLM._start

    def spy(self, model, *args):
        seen.append(isinstance(model.layers[0].attn.wq_a, PackedLinear))
        return start(self, model, *args)

    monkeypatch.setattr(LLM, "_start", spy)
    return seen


def test_generate_gives_the_same_tokens(folder, started):
    prompts, tokens = '{"prompt_token_ids": [3, 5, 8]}\n{"prompt_token_ids": [9, 2, 4, 7]}\n', []
    for more in ((), ("--weights", "expanded"), ("--weights", "packed")):
        result = CliRunner().invoke(cli, [*GENERATE, "--model", folder, *more], input=prompts)
        assert result.exit_code == 0, result.output
        tokens.append([json.loads(line)["outputs"][0]["token_ids"] for line in result.stdout.splitlines()])
    assert started[1:] == [False, True] and tokens[0] == tokens[1] == tokens[2] and len(tokens[0]) == 2


def test_profile_measures_packed_weights(folder, started):
    """It loaded them expanded, whatever was asked for."""
    more = ("--profile", "--max-tokens", "16")
    result = CliRunner().invoke(cli, [*BENCH, "--model", folder, "--weights", "packed", *more])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout.splitlines()[-1])["profiles"]) == 4 and started and all(started)


def test_bench_measures_packed_weights(folder, started):
    result = CliRunner().invoke(cli, [*BENCH, "--model", folder, "--weights", "packed"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["same_tokens"] and started and all(started)


@pytest.mark.parametrize(
    "command", [("generate", "--prompt", "a"), ("chat",), ("serve", "--port", "0"), BENCH], ids=lambda words: words[0]
)
def test_a_checkpoint_with_nothing_packed_is_refused(command, tmp_path):
    plain = export_tiny(tmp_path / "model", quantise=None)
    result = CliRunner().invoke(cli, [*command, "--model", str(plain), "--weights", "packed"])
    assert isinstance(result.exception, ConfigError) or result.exit_code == 2
    assert "no quantised weight (F32" in f"{result.exception} {result.output}"


def test_an_unknown_word_is_refused():
    result = CliRunner().invoke(cli, ["generate", "--prompt", "a", "--weights", "fp8"])
    assert result.exit_code == 2 and "'expanded', 'packed'" in result.output
