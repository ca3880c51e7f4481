"""`polytempo generate` on the demo model: forms of input and output, and refusals."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import polytempo.cli.generate as generate_module
from polytempo.cli import cli
from polytempo.errors import RequestError
from polytempo.llm import LLM
from polytempo.types import CompletionOutput, Logprob, RequestOutput, RequestTimings, SamplingParams


@pytest.fixture(scope="module")
def llm():
    """The demo model, loaded once for this file."""
    return LLM(max_rows=4, max_model_len=256)


@pytest.fixture
def run(llm, monkeypatch):
    """Run the command line in this process, over the loaded model."""
    monkeypatch.setattr(generate_module, "open_llm", lambda *args: llm)

    def invoke(*args, stdin=None):
        return CliRunner().invoke(cli, ["generate", *map(str, args)], input=stdin)

    return invoke


@pytest.fixture
def run_without_model(monkeypatch):
    """The same, where refusals must come before a model is loaded."""

    def refuse(*args):
        raise AssertionError("a model was loaded before the input was checked")

    monkeypatch.setattr(generate_module, "open_llm", refuse)
    return lambda *args, stdin=None: CliRunner().invoke(cli, ["generate", *map(str, args)], input=stdin)


GREEDY = ("--temperature", 0, "--max-tokens", 3)


def objects(text):
    return [json.loads(line) for line in text.splitlines()]


def test_json_holds_what_the_api_gives(run, llm):
    result = run("--prompt", "import os", "--prompt", "class A:", "--json", *GREEDY)
    assert result.exit_code == 0, result.output
    found = objects(result.stdout)
    params = {"temperature": 0, "max_tokens": 3}
    expected = llm.generate(["import os", "class A:"], SamplingParams(**params), progress=False)
    assert [one["index"] for one in found] == [0, 1]
    assert [one["prompt"] for one in found] == ["import os", "class A:"]
    for one, output in zip(found, expected, strict=True):
        assert one["outputs"][0]["token_ids"] == list(output.outputs[0].token_ids)
        assert one["outputs"][0]["text"] == output.outputs[0].text
        assert one["outputs"][0]["finish_reason"] == str(output.outputs[0].finish_reason)
        assert one["num_prompt_tokens"] == len(output.prompt_token_ids) == len(one["prompt_token_ids"])
        assert one["num_output_tokens"] == len(output.outputs[0].token_ids)
        assert 0 < one["ttft"] <= one["seconds"]


def test_human_output_names_all_parts(run):
    result = run("--prompt", "import os", "--logprobs", 1, "--n", 2, "--seed", 5, "--max-tokens", 2)
    assert result.exit_code == 0, result.output
    assert "[1/1] prompt, 3 tokens\nimport os\n" in result.stdout
    assert "[1/1] output 1 of 2, 2 tokens, finish reason length, first after " in result.stdout
    assert "[1/1] output 2 of 2" in result.stdout
    assert result.stdout.count("(rank ") >= 4


def test_txt_file_skips_blank_lines_and_keeps_spaces(run, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text('  {"not json"\r\n\n\nimport os\n', encoding="utf-8")
    result = run("--prompts-file", file, "--json", *GREEDY)
    assert [one["prompt"] for one in objects(result.stdout)] == ['  {"not json"', "import os"]


def test_jsonl_file_takes_every_form_and_own_params(run, llm, tmp_path):
    messages = [{"role": "user", "content": "hello"}]
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "import os", "params": {"max_tokens": 1, "logit_bias": {"77": 100.0}, "temperature": 0}},
        {"prompt_token_ids": [0, 5, 6]},
        {"messages": messages, "params": {"max_tokens": None, "stop_token_ids": list(range(4096))}},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    result = run("--prompts-file", file, "--json", "--max-tokens", 2)
    assert result.exit_code == 0, result.output
    first, second, third = objects(result.stdout)
    assert first["outputs"][0]["token_ids"] == [77]
    assert second["prompt"] is None and second["prompt_token_ids"] == [0, 5, 6]
    assert second["num_output_tokens"] == 2
    assert third["prompt_token_ids"] == llm.tokenizer.apply_chat_template(messages)
    assert third["outputs"][0]["finish_reason"] == "stop" and third["num_output_tokens"] == 1


@pytest.mark.parametrize(("stdin", "prompts"), [("a b\nc\n", ["a b", "c"]), (' \n{"prompt": "a b"}\n', ["a b"])])
def test_stdin_is_jsonl_if_it_begins_with_a_brace(run, stdin, prompts):
    result = run("--prompts-file", "-", "--json", *GREEDY, stdin=stdin)
    assert [one["prompt"] for one in objects(result.stdout)] == prompts


def test_prompt_comes_before_file(run):
    result = run("--prompts-file", "-", "--prompt", "x", "--json", *GREEDY, stdin="y\n")
    assert [one["prompt"] for one in objects(result.stdout)] == ["x", "y"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "not JSON"),
        ('["a"]', "holds a list; each line must be a JSON object"),
        ('{"promt": "a"}', "unknown key 'promt'; did you mean 'prompt'?"),
        ('{"params": {}}', "found none"),
        ('{"prompt": "a", "messages": []}', "found 'prompt' and 'messages'"),
        ('{"prompt": 3}', "'prompt' must be a str, not int"),
        ('{"prompt_token_ids": "a"}', "'prompt_token_ids' must be a list, not str"),
        ('{"prompt": "a", "params": []}', "'params' must be an object, not list"),
        ('{"prompt": "a", "params": {"temprature": 1}}', "did you mean 'temperature'?"),
        ('{"prompt": "a", "params": {"top_p": 2}}', "top_p=2 is refused"),
        ('{"prompt": "a", "params": {"logit_bias": {"x": 2}}}', "logit_bias"),
    ],
)
def test_malformed_line_is_named(run_without_model, tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n\n{line}\n', encoding="utf-8")
    result = run_without_model("--prompts-file", file)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {file}:3: ") and message in result.stderr
    assert result.stderr.count("\n") == 1 and result.stdout == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt_token_ids": []}, "empty prompt"),
        ({"prompt_token_ids": [4096]}, "token id 4096 at position 0"),
        ({"prompt_token_ids": [1.5]}, "list of token ids"),
        ({"prompt_token_ids": [5] * 256}, "prompt of 256 tokens; the context holds 256"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"prompt": "a", "params": {"logprobs": 5000}}, "at most the vocabulary size 4096"),
    ],
)
def test_line_that_the_model_refuses_is_named(run, line, message):
    stdin = json.dumps({"prompt": "fine"}) + "\n" + json.dumps(line)
    result = run("--prompts-file", "-", stdin=stdin)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: <stdin>:2: ") and message in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no prompt; give --prompt TEXT or --prompts-file"),
        (("--prompts-file", "no-such.txt"), "no-such.txt: cannot be read (No such file or directory)"),
        (("--prompt", "a", "--temperature", -1), "temperature=-1.0 is refused"),
        (("--prompt", "a", "--out", "no/such/dir.jsonl"), "does not exist"),
        (("--prompt", "a", "--out", "/"), "is a directory"),
        (("--prompt", "a", "--max-tokens", "many"), "'many' is neither an integer nor 'none'"),
        (("--prompt", "a", "--logit-bias", "5:1"), "'5:1' is not TOKEN_ID=BIAS"),
        (("--prompt", "a", "--temprature", 1), "Did you mean"),
    ],
)
def test_bad_input_exits_with_2_before_loading(run_without_model, args, message):
    result = run_without_model(*args)
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.output


def test_file_that_is_empty_or_not_utf8(run_without_model, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\n  \n")
    assert f"{file}: holds no prompt" in run_without_model("--prompts-file", file).stderr
    file.write_bytes(b"abc\xff")
    assert f"{file}: is not UTF-8 (byte 3)" in run_without_model("--prompts-file", file).stderr


def test_out_writes_lines_in_order_and_never_over_a_file(run, run_without_model, monkeypatch, llm, tmp_path):
    out = tmp_path / "results.jsonl"
    monkeypatch.setattr(generate_module, "open_llm", lambda *args: llm)
    prompts = [word for place in range(6) for word in ("--prompt", f"x{place}")]
    result = run(*prompts, "--out", out, *GREEDY)
    assert result.exit_code == 0 and result.stdout == "" and "wrote 6 results" in result.stderr
    assert [one["prompt"] for one in objects(out.read_text())] == [f"x{place}" for place in range(6)]
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]
    refused = run("--prompt", "y", "--out", out, *GREEDY)
    assert refused.exit_code == 2 and "exists; pass --force" in refused.stderr
    assert len(objects(out.read_text())) == 6
    assert run("--prompt", "y", "--out", out, "--force", *GREEDY).exit_code == 0
    assert [one["prompt"] for one in objects(out.read_text())] == ["y"]


def test_failure_of_one_request_exits_with_1_and_spares_its_neighbour(run):
    line = {"prompt": "a", "params": {"allowed_token_ids": [1], "min_tokens": 2, "max_tokens": 4}}
    result = run("--prompts-file", "-", "--json", *GREEDY, stdin=json.dumps(line) + '\n{"prompt": "b"}\n')
    assert result.exit_code == 1
    failed, fine = objects(result.stdout)
    assert failed["outputs"][0]["finish_reason"] == "error" and "no token to draw" in failed["outputs"][0]["error"]
    assert fine["outputs"][0]["finish_reason"] == "length"
    assert result.stderr.startswith("Error: <stdin>:1: position ")


def test_infinite_logprob_is_null_in_json():
    entry = {7: Logprob(float("-inf"), 3)}
    choice = CompletionOutput(0, "", (7,), [entry], float("-inf"), "length")
    output = RequestOutput("r", None, (1,), [None, entry], [choice], True, RequestTimings(0.0))
    text = generate_module._line(0, output)
    assert json.loads(text)["prompt_logprobs"] == [None, {"7": {"logprob": None, "rank": 3, "decoded_token": None}}]


def test_debug_shows_where_an_error_was_raised():
    result = CliRunner().invoke(cli, ["--debug", "generate"])
    assert isinstance(result.exception, RequestError)


def test_speculation_options_reach_the_engine_and_change_no_text():
    """--draft-len is the engine's, not a field of SamplingParams, and "auto" is a value of it."""
    outputs = []
    for options in (["--speculate", "none"], ["--draft-len", "3"], ["--draft-len", "auto", "--kv-advance", "cohort"]):
        args = ["generate", "--prompt", "import os", "--temperature", "0", "--max-tokens", "12", "--json", *options]
        result = CliRunner().invoke(cli, args)
        assert result.exit_code == 0, result.output
        outputs.append(json.loads(result.stdout.splitlines()[0])["outputs"][0]["token_ids"])
    assert outputs[0] == outputs[1] == outputs[2] and len(outputs[0]) == 12


@pytest.mark.parametrize(("value", "word"), [("often", "auto"), ("300", "max_chunk")])
def test_bad_draft_len_is_named(value, word):
    result = CliRunner().invoke(cli, ["generate", "--prompt", "x", "--draft-len", value])
    assert result.exit_code == 2 and word in result.output
