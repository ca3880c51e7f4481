"""`polytempo bench`: all modes in one run, tokens compared, figures as text, JSON and plots."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from polytempo.bench.report import disagreements, table
from polytempo.bench.run import Measurement, Mode, measure
from polytempo.cli import cli
from polytempo.llm import LLM

SMALL = ["bench", "-b", "1,3", "--draft-lens", "0,2", "--prompt-lens", "4,9", "--max-tokens", "8"]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    args = [*SMALL, "--kv-advance", "per_sequence,cohort", "--scripted-acceptance", "1", "--out", str(out)]
    return CliRunner().invoke(cli, args), out


def test_table_json_and_plots(result):
    outcome, out = result
    assert outcome.exit_code == 0, outcome.output
    last = json.loads(outcome.stdout.splitlines()[-1])
    assert last["same_tokens"] and "all modes at layout ring emitted the same tokens" in outcome.output
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


def test_rounds_are_other_prompts_on_the_same_engine():
    """Two rounds decode twice the tokens, and the first round's are those of a run of one."""
    one, two = (
        measure(LLM(max_rows=2, max_model_len=32), Mode(2), rounds, 8)
        for rounds in ([[[5, 6], [7, 8, 9]]], [[[5, 6], [7, 8, 9]], [[10, 11], [12]]])
    )
    assert two.outputs[:2] == one.outputs and len(two.outputs) == 4 and two.tokens > one.tokens
    assert two.positions == one.positions and len(two.step_ms) > len(one.step_ms)
    outcome = CliRunner().invoke(cli, [*SMALL, "--rounds", "2", "--scripted-acceptance", "1"])
    last = json.loads(outcome.stdout.splitlines()[-1])
    assert last["same_tokens"] and all(f["acceptance"] in ([], [1.0, 1.0]) for f in last["results"])


def test_phases_and_shares(result):
    last = json.loads(result[0].stdout.splitlines()[-1])
    for figures in last["results"]:
        shares = figures["phase_shares"]
        assert list(shares) == ["plan", "forward", "verify", "propose"] and abs(sum(shares.values()) - 1) < 0.01
        assert shares["forward"] > 0 and shares["verify"] > 0 and min(shares.values()) >= 0


def test_a_run_without_a_timed_step_is_still_a_line():
    """Rows that end before the last prompt is read leave no step in which all decode."""
    lines = table([Measurement(Mode(0), "float32", 1, 2, outputs=[(1,), (2,)])]).splitlines()
    assert len(lines) == 2 and lines[1].split()[:5] == ["none", "float32", "1", "2", "0.0"]


def test_lists_are_crossed_and_auto_runs():
    crossed = ["--draft-lens", "auto", "--kv-layout", "ring,left_aligned", "--dtype", "float32,bfloat16"]
    sizes = ["-b", "2", "--threads", "1", "--prompt-lens", "5,3", "--max-tokens", "12", "--repeat", "2"]
    outcome = CliRunner().invoke(cli, ["bench", *crossed, *sizes])
    assert outcome.exit_code == 0, outcome.output
    results = json.loads(outcome.stdout.splitlines()[-1])["results"]
    assert [(r["dtype"], r["mode"]) for r in results] == [
        (dtype, mode)
        for dtype in ("float32", "bfloat16")
        for mode in ("none", "mtp-auto", "none-left_aligned", "mtp-auto-left_aligned")
    ]
    assert all(r["mtp_forwards_per_step"] > 0 for r in results if "auto" in r["mode"])
    assert all(r["threads"] == 1 for r in results)


def test_a_lossy_mode_is_named():
    def of(mode: Mode, *tail: int) -> Measurement:
        return Measurement(mode, "float32", 1, 2, outputs=[(1, 2), (3, *tail)])

    good, bad, baseline = of(Mode(0), 4, 5), of(Mode(1), 9, 5), of(Mode(0, kv_layout="left_aligned"), 4, 6)
    assert disagreements([good, good]) == ([], [])
    faults, notes = disagreements([good, bad, baseline])
    assert faults == ["mtp-1 at batch 2 (float32): 3 of 5 tokens before a first difference from none"]
    assert notes == ["none-left_aligned at batch 2 (float32): 4 of 5 tokens before a first difference from none"]
    elsewhere = replace(bad, batch=3)
    assert disagreements([good, elsewhere]) == ([], []), "measurements of other settings are not compared"


@pytest.mark.parametrize(
    "args",
    [["-b", "0"], ["-b", "x"], ["--draft-lens", "-1"], ["--draft-lens", "two"], ["--kv-layout", "linear"],
     ["--kv-advance", "1"], ["--dtype", "int8"], ["--threads", "0"], ["--model", "/nowhere"],
     ["--server", "http://127.0.0.1:9", "--clients", ""]],
)  # fmt: skip
def test_bad_options(args):
    outcome = CliRunner().invoke(cli, ["bench", *args])
    assert outcome.exit_code == 2 and "Traceback" not in outcome.output
