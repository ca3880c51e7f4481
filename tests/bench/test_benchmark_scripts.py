"""The scripts in benchmarks/ run, and their last line says what they measured."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support import TINY, random_model

import polytempo
from polytempo.checkpoint import export_model

ROOT = Path(polytempo.__file__).parents[1]
SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def script_module(file: str):
    """A script as a module; under a name of its own, since tests/mutations has a run.py too."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{Path(file).stem}", SCRIPTS / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def last_line(script: str, *arguments: object) -> dict:
    """Run a script; its JSON."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    export_model(random_model(replace(TINY, max_position_embeddings=1024), seed=5), folder)
    return folder


def test_every_curve_on_a_tiny_checkpoint(tiny_checkpoint, tmp_path):
    record = last_line("scale.py", "--quick", "--model", tiny_checkpoint, "--long-model", tiny_checkpoint,
                       "--out", tmp_path / "out")  # fmt: skip
    parts = {"context", "cache", "batch", "drafts", "prefill", "loading"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"{part}.png" for part in parts} | {"scale.json"}
    assert record["machine"]["threads"] >= 1 and record["machine"]["processor"]
    for points in (record["context"]["step_ms"], record["batch"]["step_ms"], record["prefill"]["tokens_per_second"]):
        assert len(points) == 2
        assert all(0 < one["min"] <= one["median"] <= one["max"] and one["runs"] == 2 for one in points.values())
    assert set(record["drafts"]["own"]) == set(record["drafts"]["scripted"]) == {"0", "2"}
    assert record["drafts"]["scripted"]["2"]["tokens_per_forward"] > 1.5
    loading = record["loading"]["float32"]
    assert loading["peak_bytes"]["median"] > 0.5 * loading["weight_bytes"]
    sizes = record["cache"]["bytes_per_token"]
    for context, formula in sizes["formula"].items():
        assert formula <= sizes["tensors"][context] < 1.5 * formula
        assert sum(sizes["parts"][context].values()) == pytest.approx(sizes["tensors"][context])


def test_points_that_the_model_has_no_positions_for_are_said(tiny_checkpoint, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    scale = script_module("scale.py")
    bench = scale.Bench(scale.QUICK, tiny_checkpoint, tiny_checkpoint)
    assert bench._within((128, 1022, 1023)) == [128, 1022]
    assert "1023 tokens: skipped, the model has 1024 positions" in capsys.readouterr().out


@pytest.mark.long
def test_start_by_phase():
    result = last_line("startup.py", "--repeat", 1)
    phases = [value for name, value in result.items() if name.startswith("ours: ")]
    assert len(phases) == 6 and all(value >= 0 for value in phases)
    assert result["to first token"] == pytest.approx(sum(phases), abs=1e-3)
    assert result["floor"] == pytest.approx(result["import torch"] + result["ours: weights"], abs=1e-3)
    assert result["ratio"] == pytest.approx(result["to first token"] / result["floor"], abs=1e-3)


@pytest.mark.parametrize(("code", "limit", "expected"), [
    ("print('{\"size\": 1}', flush=True); raise SystemExit('no such kernel')", 30, [{"size": 1}, "no such kernel"]),
    ("import time; print('{\"size\": 1}', flush=True); time.sleep(60)", 2, [{"size": 1}, "no further figure in 2 s"]),
    # vLLM's workers outlive it and hold its pipes.
    ("import subprocess; subprocess.Popen(['sleep', '60']); raise SystemExit('no start')", 30, ["no start"]),
])  # fmt: skip
def test_an_engine_that_fails_is_skipped_with_its_reason(code, limit, expected):
    run = script_module("peers/run.py")

    found = list(run.figures([sys.executable, "-c", code], limit))
    assert found == [one if isinstance(one, dict) else {"failed": one} for one in expected]


def test_ratios_are_to_transformers_at_the_same_dtype_and_size():
    run = script_module("peers/run.py")

    def row(engine, dtype, size, speed):
        return {"engine": engine, "dtype": dtype, "mode": "none", "kind": "decode", "size": size,
                "tokens_per_second": speed, "step_ms": 1.0, "prefill_tokens_per_second": speed}  # fmt: skip

    rows = [row("polytempo", "bfloat16", 8, 300.0), row("polytempo", "float32", 8, 90.0),
            row("transformers", "bfloat16", 1, 7.0), row("transformers", "bfloat16", 8, 100.0),
            row("transformers", "float32", 8, 60.0)]  # fmt: skip
    assert run.ratio(rows[0], rows, "tokens_per_second") == "3.00"
    assert run.ratio(rows[1], rows, "tokens_per_second") == "1.50"
    assert run.ratio(row("vllm", "float16", 8, 1.0), rows, "tokens_per_second") == "-"
    failed = {"engine": "vllm", "dtype": "bfloat16", "mode": "none", "failed": "no module"}
    assert "skipped: no module" in run.table([*rows, failed])


def test_the_median_of_repeats_counts_unless_one_failed():
    run = script_module("peers/run.py")

    base = {"engine": "polytempo", "kind": "prefill", "size": 64}
    taken = [{**base, "prefill_tokens_per_second": speed} for speed in (30.0, 10.0, 20.0)]
    assert run.median_of(taken)["prefill_tokens_per_second"] == 20.0
    assert run.median_of([*taken, {**base, "failed": "killed"}])["failed"] == "killed"


def test_draft_lengths_in_turns(tmp_path):
    """Modes take turns, their tokens agree, and only steps in which all rows decode are counted."""
    record = last_line("turns.py", "-b", "1,3", "--draft-lens", "0,2,auto", "--max-tokens", "12", "--repeat", "2",
                       "--out", tmp_path / "out.json")  # fmt: skip
    assert record["rows"] == 3 and set(record["tokens_per_second"]) == {"0", "2", "auto"}
    assert set(record["ratio_to_0"]) == {"2", "auto"}
    assert all(ratio > 0 and error > 0 for ratio, error in record["ratio_to_0"].values())
    first, second = json.loads((tmp_path / "out.json").read_text())
    assert len(first["runs"]) == len(second["runs"]) == 2 and first["rows"] == 1
    turns = script_module("turns.py")
    runs = [{"0": 10.0, "1": 12.0}, {"0": 20.0, "1": 20.0}]
    assert turns.summary(runs, ["0", "1"]) == {"tokens_per_second": {"0": 15, "1": 16}, "ratio_to_0": {"1": [1.1, 0.1]}}
