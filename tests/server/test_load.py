"""`polytempo bench --server`: what it sends, measures and writes."""

import json
import statistics
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner
from server_support import byte_tokenizer, wait_until

from polytempo.bench.load import Load, percentile, run_load
from polytempo.cli import cli


def bench(server, out, *options):
    """The runs of one command, as printed and as written."""
    command = ["bench", "--server", server.url, "--prompt-lens", "3,20", "--max-tokens", "6", "--out", str(out)]
    done = CliRunner().invoke(cli, [*command, *options])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout.splitlines()[-1])["runs"]
    written = json.loads((out / "bench.json").read_text())["runs"]
    assert all(one | other == one for one, other in zip(written, printed, strict=True))
    return written


def test_bench_of_a_server(server, tmp_path):
    before = server.metrics()
    (run,) = bench(server, tmp_path / "out", "--clients", "3", "--requests", "7")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["bench.json", "latency.png"]
    assert run["num_requests"] == 7 and run["output_tokens"] == 42
    assert (run["num_clients"], run["rate"]) == (3, None)
    assert run["prompt_tokens"] == sum(1 + size for size in (9, 60, 9, 60, 9, 60, 9))
    assert len(byte_tokenizer().encode("x" * 9)) == 10
    for request in run["requests"]:
        assert 0 < request["ttft"] < run["seconds"] and 0 < request["tpot"] <= request["longest_gap"]
        assert request["longest_gap"] == max(request["gaps"])
        assert sum(request["gaps"]) == pytest.approx(5 * request["tpot"])
    gaps = [gap for request in run["requests"] for gap in request["gaps"]]
    assert run["gap"]["p50"] == percentile(gaps, 50) and run["gap"]["p99"] == max(gaps)
    for name in ("ttft", "tpot", "gap", "longest_gap"):
        assert 0 < run[name]["p50"] <= run[name]["p90"] <= run[name]["p99"]
    after = server.metrics()
    assert after["polytempo_output_tokens_total"] - before["polytempo_output_tokens_total"] == 42


@pytest.mark.parametrize(
    ("option", "values", "key"), [("--clients", "1,3", "num_clients"), ("--rates", "200,50.5", "rate")]
)
def test_by_load(server, tmp_path, option, values, key):
    runs = bench(server, tmp_path / "out", option, values, "--requests", "4")
    assert [run[key] for run in runs] == [float(value) for value in values.split(",")]
    assert all(run["num_requests"] == 4 for run in runs)
    for name in ("latency.png", f"latency_by_{key.removeprefix('num_')}.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_requests_at_a_rate_come_at_random_and_do_not_wait_for_answers(server):
    """All are sent while not one is answered, as many as clients never would."""
    moments = Load("", num_requests=2000, rate=50.0).arrivals()
    steps = [later - sooner for sooner, later in zip(moments, moments[1:], strict=False)]
    assert moments[0] == 0 and moments == sorted(moments) and statistics.mean(steps) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.stdev(steps) == pytest.approx(1 / 50, rel=0.2)  # exponential: spread and mean are equal
    load = Load(server.url, num_requests=5, num_clients=1, rate=1000.0, prompt_lens=(3,), max_tokens=3)
    server.gate.shut()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run_load, load)
        try:
            wait_until(lambda: server.front.num_unfinished_rows == 5, "all five were sent")
        finally:
            server.gate.open()
        assert running.result()["num_requests"] == 5


@pytest.mark.parametrize("rates", ["0", "nan", "inf", "fast", "1,-2"])
def test_no_rate(rates):
    done = CliRunner().invoke(cli, ["bench", "--server", "http://127.0.0.1:1", "--rates", rates])
    assert done.exit_code == 2 and "is not a number above 0" in done.output


def test_no_clients(tmp_path):
    """It wrote an empty plot and called that a success."""
    done = CliRunner().invoke(cli, ["bench", "--server", "http://127.0.0.1:1", "--clients", "", "--out", str(tmp_path)])
    assert done.exit_code == 2 and "--clients, or --rates" in done.output and not list(tmp_path.iterdir())


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
