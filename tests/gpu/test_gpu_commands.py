"""The commands with --device: what they check themselves, and what they say of where they ran."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from polytempo import invariance
from polytempo.cli import cli
from polytempo.device import describe_device
from polytempo.llm import DEMO_MODEL, LLM


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_demo_finds_every_prompt_identical_to_itself_alone(device):
    assert "8 of 8 identical" in run("demo", "--device", str(device))


@pytest.mark.parametrize("weights", ["expanded", "packed"])
def test_bench_finds_equal_tokens_and_names_the_device(device, weights):
    text = run("bench", "--device", str(device), "-b", "1,3", "--draft-lens", "0,2", "--max-tokens", "8",
               "--prompt-lens", "20,33", "--weights", weights)  # fmt: skip
    found = json.loads(text.splitlines()[-1])
    assert text.startswith(f"device: {describe_device(device)}\n") and found["same_tokens"]
    assert {result["device"] for result in found["results"]} == {describe_device(device)}
    assert all(result["tokens_per_second"] > 0 for result in found["results"])


def test_a_profile_names_what_ran_on_the_device(device):
    text = run("bench", "--profile", "--device", str(device), "-b", "2", "--draft-lens", "0", "--max-tokens", "7",
               "--prompt-lens", "20", "--kernels", "torch" if device.type == "cpu" else "auto")  # fmt: skip
    (profile,) = json.loads(text.splitlines()[-1])["profiles"]
    assert profile["device"] == describe_device(device) and not profile["in_kernels"]
    measured = {name: ms for name, ms in profile["parts"].items() if name != "torch and Python"}
    assert len(measured) > 5 and sum(measured.values()) > 0


def test_generate_gives_what_the_python_api_gives(device):
    text = run("generate", "--device", str(device), "--prompt", "import os", "--temperature", "0", "--max-tokens", "5",
               "--max-model-len", "256", "--json")  # fmt: skip
    llm = LLM(device=device, max_model_len=256, progress=False)
    assert llm.model.device == device and llm.engine.target.store.device == device
    expected = json.loads(text)["outputs"][0]["token_ids"]
    assert expected and llm.tokenizer.decode(expected) == json.loads(text)["outputs"][0]["text"]


def test_invariance_finds_no_operation_that_depends_on_its_rows(device, capsys):
    code = invariance.main(["--device", str(device), "--dtype", "bfloat16", "--model", str(DEMO_MODEL)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0 and not found["failed"] and found["probes"] > 20
    assert found["device"] == describe_device(device)
