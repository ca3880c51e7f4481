"""Help, chat, demo, inspect, export, and the script itself."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

import polytempo.cli.chat as chat_module
from polytempo.checkpoint import inspect_checkpoint, load_model
from polytempo.cli import cli
from polytempo.cli.chat import Conversation
from polytempo.cli.options import given_sampling
from polytempo.demo import demo_prompts, run_demo
from polytempo.engine_config import EngineConfig
from polytempo.errors import RequestError
from polytempo.llm import DEMO_MODEL, LLM
from polytempo.types import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from checkpoint_helpers import differing, export_tiny, read_tensors, write_tensors  # noqa: E402


@pytest.fixture(scope="module")
def llm():
    """The demo model with a small context, loaded once for this file."""
    return LLM(max_rows=3, max_model_len=1024)


def script(*args, stdin=""):
    command = [sys.executable, "-c", "from polytempo.cli import main; main()", *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["demo"], ["inspect"], ["export"]])
def test_help_explains_without_importing_torch(command):
    code = (
        "import sys\nfrom polytempo.cli import cli\n"
        f"try:\n    cli({[*command, '--help']!r})\n"
        "finally:\n    assert not {'torch', 'tokenizers', 'tqdm'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Example" in result.stdout or command == ["demo"]


def test_script_prints_one_line_for_an_error_and_exits_with_2():
    result = script("generate", "--model", "no/such/dir", "--prompt", "a")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == (
        "Error: no/such/dir/config.json: no such directory; a checkpoint directory needs config.json\n"
    )


def test_unknown_command_suggests_the_nearest():
    result = CliRunner().invoke(cli, ["generat"])
    assert result.exit_code == 2 and "No such command 'generat'" in result.stderr


def test_unusable_device_is_an_error_of_one_line():
    result = CliRunner().invoke(cli, ["generate", "--prompt", "a", "--device", "nonsense"])
    assert result.exit_code == 2 and result.stderr.startswith("Error: option 'device': unknown device 'nonsense'")
    assert result.stderr.count("\n") == 1


def test_every_sampling_field_but_text_switches_has_an_option():
    names = {parameter.name for parameter in cli.commands["generate"].params}
    missing = {field.name for field in fields(SamplingParams)} - names
    assert missing <= {"skip_special_tokens", "detokenize", "draft_len"}


def test_help_states_the_defaults_of_the_api():
    options = {option.name: option for option in cli.commands["generate"].params if isinstance(option, click.Option)}
    for config in (EngineConfig(), SamplingParams()):
        for field in fields(config):
            value = getattr(config, field.name)
            if field.name in options and isinstance(value, (int, float)) and not isinstance(value, bool):
                assert f"[default: {value:g}" in options[field.name].help, field.name


def test_options_not_given_are_not_passed():
    not_given = {"top_p": None, "stop": (), "ignore_eos": False, "model": "x"}
    assert given_sampling({**not_given, "temperature": 0.0, "top_k": 0}) == {"temperature": 0.0, "top_k": 0}
    assert given_sampling({"max_tokens": "none", "logit_bias": ((1, 2.0),)}) == {
        "max_tokens": None,
        "logit_bias": {1: 2.0},
    }


# --- chat ---------------------------------------------------------------------------------------------------


@pytest.fixture
def chat(llm, monkeypatch):
    monkeypatch.setattr(chat_module, "open_llm", lambda *args: llm)
    return lambda *args, stdin: CliRunner().invoke(cli, ["chat", *map(str, args)], input=stdin)


def test_chat_over_a_pipe_streams_the_reply_that_generate_gives(chat, llm):
    result = chat("--temperature", 0, "--max-tokens", 6, stdin="def f(x):\n\nimport os\n")
    assert result.exit_code == 0, result.output
    params = SamplingParams(temperature=0, max_tokens=6)
    messages = [{"role": "user", "content": "def f(x):"}]
    first = llm.chat(messages, params, progress=False)[0].outputs[0].text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "import os"}]
    second = llm.chat(messages, params, progress=False)[0].outputs[0].text
    assert result.stdout == f"{first}\n{second}\n"
    assert result.stderr.count("[cut after 6 tokens: --max-tokens]") == 2


def test_chat_reset_forgets_and_exit_ends(chat, llm):
    greedy = ("--temperature", 0, "--max-tokens", 4)
    once = chat(*greedy, stdin="import os\n").stdout
    result = chat(*greedy, stdin="import os\n/reset\nimport os\n/exit\nimport os\n")
    assert result.stdout == once * 2
    assert "new conversation" in result.stderr


def test_chat_refuses_unknown_commands_but_takes_slashes(chat):
    result = chat("--max-tokens", 1, stdin="/rest\n/usr/bin is a path\n")
    assert "unknown command /rest; /reset begins" in result.stderr
    assert result.stdout.count("\n") >= 1


def test_chat_says_when_the_context_is_full(chat, llm):
    long = "x = 1; " * 600
    result = chat("--max-tokens", 2, stdin=f"{long}\nimport os\n")
    assert result.exit_code == 0
    assert "the context holds 1024, reply included; this message was not sent. /reset begins" in result.stderr
    assert "[cut after 2 tokens" in result.stderr  # the refused message was forgotten, the next one answered


class ScriptedLLM:
    """Streams fixed pieces; the token ids of a conversation are its characters."""

    def __init__(self, pieces, fail=None):
        self.pieces, self.fail, self.prompts = pieces, fail, []
        self.tokenizer = SimpleNamespace(apply_chat_template=self._ids)
        self.engine = SimpleNamespace(config=SimpleNamespace(max_model_len=10_000))

    def _ids(self, messages):
        self.prompts.append(messages)
        return [1] * sum(len(message["content"]) for message in messages)

    def stream(self, prompt, params):
        yield from self.pieces
        if self.fail is not None:
            raise self.fail
        return SimpleNamespace(outputs=[SimpleNamespace(finish_reason="stop")])


def test_ctrl_c_stops_a_reply_and_keeps_what_was_said(capsys):
    conversation = Conversation(ScriptedLLM(["half ", "a re"], KeyboardInterrupt()), SamplingParams(), "be brief")
    conversation.answer("hello")
    captured = capsys.readouterr()
    assert captured.out == "half a re\n" and captured.err == "[stopped]\n"
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    assert conversation.messages[-1]["content"] == "half a re"
    conversation.reset()
    assert [message["role"] for message in conversation.messages] == ["system"]


def test_failed_reply_is_reported_and_forgotten(capsys):
    conversation = Conversation(ScriptedLLM(["half"], RequestError("request failed at position 3")), SamplingParams())
    conversation.answer("hello")
    assert "Error: request failed at position 3" in capsys.readouterr().err
    assert conversation.messages == []


# --- demo ---------------------------------------------------------------------------------------------------


def test_demo_refills_a_seat_and_finds_all_identical(llm, capsys):
    assert run_demo(llm)
    printed = capsys.readouterr().out
    assert printed.endswith("\n8 of 8 identical\n")
    assert printed.count(" taken by ") == printed.count(" left by ") == 8 > llm.engine.config.max_rows


def test_demo_prompts_differ_in_length_and_leave_at_different_times(llm):
    prompts = demo_prompts()
    lengths = sorted(len(llm.tokenizer.encode(prompt.text)) for prompt in prompts)
    assert len(set(lengths)) == len(prompts) == len({prompt.max_tokens for prompt in prompts})
    assert lengths[0] < 8 and 128 < lengths[-3] and 600 < lengths[-1] < 900
    assert {prompt.seed is None for prompt in prompts} == {True, False}


def test_demo_notices_one_bit_of_one_log_probability(llm, capsys, monkeypatch):
    monkeypatch.setattr("polytempo.demo.demo_prompts", lambda: [demo_prompts()[0], demo_prompts()[6]])
    generate = type(llm).generate

    def disturbed(self, prompts, *args, **options):
        outputs = generate(self, prompts, *args, **options)
        if prompts == "import ":  # alone: the batch passes a list
            token_id, entry = next(iter(outputs[0].outputs[0].logprobs[-1].items()))
            changed = replace(entry, logprob=math.nextafter(entry.logprob, 0.0))
            outputs[0].outputs[0].logprobs[-1][token_id] = changed
        return outputs

    monkeypatch.setattr(type(llm), "generate", disturbed)
    assert not run_demo(llm)
    printed = capsys.readouterr().out
    assert printed.endswith("\n1 of 2 identical\n") and " NO " in printed


@pytest.mark.parametrize(("is_right", "exit_code"), [(True, 0), (False, 1)])
def test_demo_exit_code(monkeypatch, is_right, exit_code):
    monkeypatch.setattr("polytempo.cli.open_llm", lambda *args: None)
    monkeypatch.setattr("polytempo.demo.run_demo", lambda llm: is_right)
    assert CliRunner().invoke(cli, ["demo"]).exit_code == exit_code


def test_demo_redraws_seats_on_a_terminal(llm, capsys, monkeypatch):
    monkeypatch.setattr("polytempo.demo.demo_prompts", lambda: [demo_prompts()[0], demo_prompts()[6]])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run_demo(llm)
    printed = capsys.readouterr().out
    assert "\x1b[4F\x1b[2Kseat 0  import" in printed and "0 running, 0 waiting, 2 done" in printed


# --- inspect and export -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny checkpoint of random weights, official and quantised, with the demo model's tokenizer."""
    return export_tiny(tmp_path_factory.mktemp("tiny") / "official", tokenizer_dir=DEMO_MODEL)


def run_cli(*args):
    return CliRunner().invoke(cli, [*map(str, args)])


def test_inspect_prints_for_people_and_as_json(tiny):
    result = run_cli("inspect", tiny, "--rows", 3, "--context", 128)
    assert result.exit_code == 0 and result.stdout == f"{inspect_checkpoint(tiny, 3, 128)}\n"
    found = json.loads(run_cli("inspect", tiny, "--rows", 3, "--context", 128, "--json").stdout)
    assert found["rows"] == 3 and found["context"] == 128 and found["report"]["can_speculate"]
    assert "demo_model" in run_cli("inspect").stdout


def test_inspect_exits_with_1_for_what_cannot_be_loaded_and_2_for_what_cannot_be_read(tiny, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    tensors = read_tensors(broken)
    del tensors["head.weight"]
    write_tensors(broken, tensors)
    result = run_cli("inspect", broken)
    assert result.exit_code == 1 and "head.weight" in result.stdout
    (broken / "config.json").unlink()
    result = run_cli("inspect", broken)
    assert result.exit_code == 2 and result.stderr.startswith("Error: ") and "config.json" in result.stderr
    assert run_cli("inspect", tiny, "--rows", 0).exit_code == 2


def test_export_there_and_back_keeps_every_bit(tiny, tmp_path):
    result = run_cli("export", tiny, "--to", "huggingface", "--out", tmp_path / "hf")
    assert result.exit_code == 0 and "huggingface form" in result.stderr, result.output
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    back = run_cli("export", tmp_path / "hf", "--to", "official", "--quantise", "fp8-fp4", "--out", tmp_path / "back")
    assert back.exit_code == 0, back.output
    assert not differing(load_model(tiny)[0], load_model(tmp_path / "hf")[0])
    assert not differing(load_model(tiny)[0], load_model(tmp_path / "back")[0])


def test_export_refuses_before_it_reads_weights(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("polytempo.checkpoint.load_model", lambda *args: pytest.fail("weights were read"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    for args, message in (
        (("--to", "official", "--out", tmp_path / "full"), "is not empty; choose another directory or pass --force"),
        (("--to", "official", "--out", tiny, "--force"), "is the checkpoint itself"),
        (("--to", "huggingface", "--quantise", "fp8", "--out", tmp_path / "x"), "is for the official form"),
        (("--to", "onnx", "--out", tmp_path / "x"), "'onnx' is not one of"),
    ):
        result = run_cli("export", tiny, *args)
        assert result.exit_code == 2 and message in result.stderr, result.output


def test_export_with_force_writes_into_a_directory_that_is_not_empty(tiny, tmp_path):
    (tmp_path / "notes.txt").touch()
    assert run_cli("export", tiny, "--to", "official", "--out", tmp_path, "--force").exit_code == 0
    assert (tmp_path / "notes.txt").is_file() and not differing(load_model(tiny)[0], load_model(tmp_path)[0])
