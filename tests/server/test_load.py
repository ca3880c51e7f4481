"""`polytempo bench --server`: what it sends, measures and writes."""

import json

import pytest
from click.testing import CliRunner
from server_support import byte_tokenizer

from polytempo.bench.load import percentile
from polytempo.cli import cli


def test_bench_of_a_server(server, tmp_path):
    options = ["bench", "--server", server.url, "--clients", "3", "--requests", "7", "--prompt-lens", "3,20",
               "--max-tokens", "6", "--out", str(tmp_path / "out")]  # fmt: skip
    before = server.metrics()
    done = CliRunner().invoke(cli, options)
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout.splitlines()[-1])
    written = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert (tmp_path / "out" / "latency.png").stat().st_size > 1000 and written | printed == written
    assert printed["num_requests"] == 7 and printed["output_tokens"] == 42
    assert printed["prompt_tokens"] == sum(1 + size for size in (9, 60, 9, 60, 9, 60, 9))
    assert len(byte_tokenizer().encode("x" * 9)) == 10
    for request in written["requests"]:
        assert 0 < request["ttft"] < printed["seconds"] and 0 < request["tpot"] <= request["longest_gap"]
    assert 0 < printed["tpot"]["p50"] <= printed["tpot"]["p90"] <= printed["tpot"]["p99"]
    after = server.metrics()
    assert after["polytempo_output_tokens_total"] - before["polytempo_output_tokens_total"] == 42


def test_percentiles():
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, percent) for percent in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert percentile([3.0], 99) == 3.0 and percentile([2.0, 1.0], 50) == 1.0


@pytest.mark.parametrize(
    ("url", "reason"),
    [("http://127.0.0.1:1", "cannot be reached"), (None, "400"), ("https://127.0.0.1:1", "must be http://"),
     ("here", "must be http://")],
)  # fmt: skip
def test_failures(server, url, reason):
    options = ["bench", "--server", url or server.url, "--requests", "1", "--prompt-lens", "900"]
    done = CliRunner().invoke(cli, options)
    assert done.exit_code == 2 and reason in done.output
