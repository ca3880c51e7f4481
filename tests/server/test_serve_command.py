"""`polytempo serve` before it serves: what it refuses, and what it says that it will do."""

from byte_support import tiny_llm
from click.testing import CliRunner

from polytempo.cli import cli
from polytempo.cli.serve import _greeting


def greeting(host="127.0.0.1", api_key=None, **options):
    return _greeting(tiny_llm(**options), "tiny", host, 8000, {"api_key": api_key})


def test_greeting():
    said = greeting()
    assert "model    tiny: 3 layers, float32 on cpu" in said and "rows     4 of 256 tokens" in said
    assert "64 more may wait" in said and "drafts   2 per step, advance per_sequence" in said
    assert "http://127.0.0.1:8000/v1/completions" in said and "warning" not in said and "Bearer" not in said
    assert "drafts   none" in greeting(speculate="none")


def test_greeting_warns_when_others_can_reach_it():
    assert "no --api-key guards it" in greeting("0.0.0.0") and "http://127.0.0.1:8000/" in greeting("0.0.0.0")
    guarded = greeting("0.0.0.0", api_key="secret")
    assert "warning" not in guarded and "Bearer KEY" in guarded and "secret" not in guarded
    assert "http://[::1]:8000/" in greeting("::1")


def test_refusals():
    for options, reason in ((["--model", "/nowhere"], "/nowhere"), (["--port", "70000"], "port"),
                            (["--max-rows", "0"], "max_rows"), (["--mixed-prompt-tokens", "0"], "mixed-prompt-tokens"),
                            (["--device", "nothing"], "nothing")):  # fmt: skip
        done = CliRunner().invoke(cli, ["serve", *options])
        assert done.exit_code == 2 and reason in done.output, done.output
