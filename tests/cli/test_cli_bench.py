"""`polytempo bench`: all modes in one run, tokens compared, figures as text, JSON and plots."""

import json

import pytest
from click.testing import CliRunner

from polytempo.bench.report import disagreements
from polytempo.bench.run import Measurement
from polytempo.cli import cli

SMALL = ["bench", "-b", "1,3", "--draft-lens", "0,2", "--prompt-lens", "4,9", "--max-tokens", "8"]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    return CliRunner().invoke(cli, [*SMALL, "--cohort", "--scripted-acceptance", "1", "--out", str(out)]), out


def test_table_json_and_plots(result):
    outcome, out = result
    assert outcome.exit_code == 0, outcome.output
    last = json.loads(outcome.stdout.splitlines()[-1])
    assert last["same_tokens"] and "all modes emitted the same tokens" in outcome.output
    assert [(r["mode"], r["batch"]) for r in last["results"]] == [
        (mode, batch) for batch in (1, 3) for mode in ("none", "mtp-2", "mtp-2-cohort")
    ]
    assert {path.name for path in out.iterdir()} == {"bench.json", "throughput.png", "positions.png"}
    assert len(json.loads((out / "bench.json").read_text())[0]["series"]["step_ms"]) == last["results"][0]["steps"]


def test_scripted_acceptance_of_1_accepts_everything(result):
    """Drafts that are always right: three tokens per forward, but for the last step, which has room for fewer."""
    last = json.loads(result[0].stdout.splitlines()[-1])
    for figures in last["results"]:
        if figures["mode"] == "none":
            assert figures["tokens_per_forward"] == 1.0 and figures["acceptance"] == []
        else:
            assert figures["acceptance"] == [1.0, 1.0] and figures["tokens_per_forward"] > 2.0


def test_scripted_acceptance_of_0_accepts_nothing():
    outcome = CliRunner().invoke(cli, [*SMALL, "--scripted-acceptance", "0"])
    last = json.loads(outcome.stdout.splitlines()[-1])
    assert all(f["acceptance"] == [0.0, 0.0] for f in last["results"] if f["mode"] != "none") and last["same_tokens"]


def test_a_lossy_mode_is_named():
    good, bad = (Measurement(mode, 2, outputs=[(1, 2), tail]) for mode, tail in (("none", (3,)), ("mtp-1", (4,))))
    assert disagreements([good, good]) == []
    assert disagreements([good, bad]) == ["mtp-1 at batch 2: rows [1] differ from none"]


@pytest.mark.parametrize("args", [["-b", "0"], ["-b", "x"], ["--draft-lens", "-1"], ["--model", "/nowhere"]])
def test_bad_options(args):
    outcome = CliRunner().invoke(cli, ["bench", *args])
    assert outcome.exit_code == 2 and "Traceback" not in outcome.output
