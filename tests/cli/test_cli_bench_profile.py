"""`polytempo bench --profile`: every part of a step is timed, and nothing is counted twice."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner

from polytempo.cli import cli
from polytempo.errors import ConfigError

SMALL = ["bench", "--profile", "-b", "3", "--prompt-lens", "4,9", "--max-tokens", "12"]


def profiles(*options):
    outcome = CliRunner().invoke(cli, [*SMALL, *options])
    assert outcome.exit_code == 0, outcome.output
    return json.loads(outcome.stdout.splitlines()[-1])["profiles"], outcome.output


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")
def test_parts_of_the_kernels(tmp_path):
    (plain, drafting), text = profiles("--draft-lens", "0,2", "--kernels", "native", "--out", str(tmp_path))
    parts = plain["parts"]
    expected = {"mhc", "inputs", "queries", "entries", "attention", "output", "router", "experts", "head", "linear"}
    assert set(parts) == expected | {"combine", "torch and Python"}
    assert parts.pop("combine") == 0 < drafting["parts"]["combine"]
    assert all(ms > 0 for ms in parts.values()) and sum(parts.values()) == pytest.approx(plain["step_ms"])
    assert sum(plain["phases"].values()) == pytest.approx(plain["step_ms"])
    assert parts["experts"] + parts["attention"] < plain["phases"]["forward"]
    assert drafting["phases"]["propose"] > 0 and drafting["mode"]["draft_len"] == 2
    assert "part of the kernels" in text and json.loads((tmp_path / "profile.json").read_text())


def test_operators_of_torch():
    threads = torch.get_num_threads()
    (plain,), text = profiles("--draft-lens", "0", "--kernels", "torch")
    assert plain["parts"]["aten::mm"] > 0 and not plain["in_kernels"] and "torch operator" in text
    assert torch.get_num_threads() == threads


def test_a_profile_of_no_step_is_refused():
    """It printed 0 ms a step."""
    result = CliRunner().invoke(cli, [*SMALL, "--draft-lens", "0", "--max-tokens", "3"])
    assert isinstance(result.exception, ConfigError) or result.exit_code == 2
    assert "--max-tokens must be larger" in f"{result.exception} {result.output}"


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")
def test_timers_are_off_outside_a_profile():
    from polytempo.kernels.build import load

    library = load()
    profiles("--draft-lens", "0", "--kernels", "native")
    assert library.pt_part_seconds(0) == 0.0
