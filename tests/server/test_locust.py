"""A public load generator against `polytempo serve`: what it counted is what was asked for and what /metrics say."""

import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from server_support import PATIENCE

# Looked up, not imported: locust replaces this process's sockets and threads by gevent's.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="pip install 'polytempo[test]'")

REQUESTS, TOKENS, CLIENTS = 24, 12, 4
ROUTES = ("/v1/completions", "/v1/completions stream", "/v1/chat/completions", "/v1/chat/completions stream")


def run_locust(port: int) -> tuple[subprocess.CompletedProcess, dict[tuple[str, str], dict]]:
    """What it printed, and the rows of its table by (type, name)."""
    command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py")), "--headless",
               "-u", str(CLIENTS), "-r", str(CLIENTS), "--requests", str(REQUESTS), "--max-tokens", str(TOKENS),
               "--host", f"http://127.0.0.1:{port}", "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=8 * PATIENCE,
                          env=os.environ | {"NO_PROXY": "127.0.0.1"})  # fmt: skip
    rows = json.loads(done.stdout[done.stdout.index("[\n") :] if "[\n" in done.stdout else "[]")
    return done, {(row["method"], row["name"]): row for row in rows}


def metrics(port: int) -> dict[str, float]:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE).read().decode()
    return {name: float(value) for name, value in
            (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))}  # fmt: skip


def test_locust_counts_what_the_server_counts(launched):
    server = launched()
    done, rows = run_locust(server.port)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert all(row["num_failures"] == 0 for row in rows.values())
    assert [rows["POST", route]["num_requests"] for route in ROUTES] == [REQUESTS // 4] * 4
    assert [rows["TTFT", route]["num_requests"] for route in ROUTES[1::2]] == [REQUESTS // 4] * 2
    sizes = {name: row["total_content_length"] for (kind, name), row in rows.items() if kind == "TOKENS"}
    assert sizes["output"] == REQUESTS * TOKENS
    counted = metrics(server.port)
    assert counted["polytempo_output_tokens_total"] == sizes["output"]
    assert counted["polytempo_prompt_tokens_total"] == sizes["prompt"] > REQUESTS
    assert counted['polytempo_choices_total{finish_reason="length"}'] == REQUESTS
    assert counted["polytempo_ttft_seconds_count"] == counted["polytempo_tpot_seconds_count"] == REQUESTS
    for path in ROUTES[::2]:
        assert counted[f'polytempo_http_responses_total{{path="{path}",status="200"}}'] == REQUESTS // 2
    # Four clients on two seats: the first four requests are open at once.
    assert rows["AT ONCE", "requests"]["max_response_time"] == CLIENTS
    assert counted["polytempo_rows_running"] == counted["polytempo_rows_waiting"] == 0


def test_locust_reports_what_the_server_refuses(launched):
    """The same generator fails, and says why, when answers are not what was asked for: no context holds these."""
    server = launched("--max-model-len", "8")
    done, rows = run_locust(server.port)
    assert done.returncode == 1 and sum(rows["POST", route]["num_failures"] for route in ROUTES) == REQUESTS
    assert "TOKENS" not in {kind for kind, _ in rows}
