"""Clients that vanish, full queues, steps that raise or hang: seats come back, and everybody is told."""

import json
import threading
import time

import pytest
from server_support import Gate, open_request, running, tiny_llm, wait_until

from polytempo.types import SamplingParams

LONG = {"prompt": "x" * 200, "max_tokens": 50, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "ab", "max_tokens": 24, "ignore_eos": True, "temperature": 0}
COMPLETIONS = "/v1/completions"
SOON = 10.0  # seconds; it is far below one on an idle machine


@pytest.fixture
def held():
    """A server with one seat, its engine held back."""
    llm = tiny_llm(max_rows=1, queue_limit=4)
    gate = Gate(llm)
    gate.shut()
    with running(llm) as server:
        server.gate = gate
        yield server
        gate.open()


def rows(server):
    scheduler = server.llm.engine.scheduler
    return len(scheduler.running), len(scheduler.waiting)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_client_vanishes_while_queued(held, stream):
    keeper = open_request(held, COMPLETIONS, SHORT | {"stream": True})
    wait_until(lambda: rows(held) == (0, 1), "the first is queued")
    held.gate.let(2)
    leaver = open_request(held, COMPLETIONS, SHORT | {"stream": stream})
    wait_until(lambda: rows(held) == (1, 1), "one runs, one waits")
    leaver.close()
    wait_until(lambda: rows(held) == (1, 0), "the queued one is gone", SOON)
    assert held.front.num_unfinished_rows == 1
    keeper.close()
    held.wait_idle()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("body", "num_steps"), [(LONG, 2), (SHORT, 4)], ids=["prefill", "decode"])
def test_client_vanishes_while_running(held, stream, body, num_steps):
    client = open_request(held, COMPLETIONS, body | {"stream": stream})
    wait_until(lambda: rows(held) == (0, 1), "it is queued")
    held.gate.let(num_steps)
    (row,) = held.llm.engine.scheduler.running
    assert bool(row.output_token_ids) == (body is SHORT) and not row.is_finished
    if body is SHORT:
        assert row.drafts, "it should vanish between drafting and verifying"
    client.close()
    wait_until(lambda: rows(held) == (0, 0), "its seat is free", SOON)
    held.wait_idle()
    held.gate.open()
    assert held.post(COMPLETIONS, SHORT)[1]["choices"][0]["text"] == answer_alone()
    # The response that nobody read was counted as such.
    wait_until(lambda: held.metrics().get('polytempo_choices_total{finish_reason="abandoned"}') == 1, "it is counted")


def answer_alone() -> str:
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0)
    return tiny_llm().generate("ab", params, progress=False)[0].outputs[0].text


def test_full_queue_is_refused_at_once(held):
    """Field case 48c: one seat, a queue of 4, 20 requests: 15 get 429 while nothing moves, the others their answer."""
    answers, lock = [], threading.Lock()

    def ask():
        try:
            result = held.request("POST", COMPLETIONS, SHORT)
        except OSError:
            return  # the server is gone: the test has failed by then
        with lock:
            answers.append(result)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(answers) == 15, "the surplus is refused while the engine stands still")
    for status, headers, text in answers:
        error = json.loads(text)["error"]
        assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
        assert headers["retry-after"] and "queue_limit (4)" in error["message"]
    held.gate.open()
    for thread in threads:
        thread.join()
    done = [json.loads(text)["choices"][0]["text"] for status, _, text in answers if status == 200]
    assert done == [answer_alone()] * 5
    held.wait_idle()
    wait_until(lambda: held.metrics()["polytempo_rows_running"] == 0, "the gauge falls")
    assert held.metrics()["polytempo_rows_waiting"] == 0


def test_priority_goes_first(held):
    order, threads = [], []

    def ask(name, priority):
        held.post(COMPLETIONS, SHORT | {"max_tokens": 3, "priority": priority})
        order.append(name)

    for place, (name, priority) in enumerate((("first", 0), ("late", 5), ("early", -1), ("equal", 5))):
        threads.append(threading.Thread(target=ask, args=(name, priority)))
        threads[-1].start()
        wait_until(lambda place=place: sum(rows(held)) == place + 1, "it is queued")
        if not place:
            held.gate.let(1)  # the first is seated already
    # Step by step, each answer awaited before the next step: otherwise the clients' threads race one another.
    while len(order) < 4:
        before = held.metrics()["polytempo_steps_total"]
        held.gate.let(1)
        wait_until(lambda before=before: held.metrics()["polytempo_steps_total"] > before, "a step")
        wait_until(lambda: sum(rows(held)) + len(order) == 4, "answers arrive")
    held.gate.open()
    for thread in threads:
        thread.join()
    assert order == ["first", "early", "late", "equal"]


@pytest.mark.parametrize("place", ["queued", "running"])
def test_deadline(held, place):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(held.post(COMPLETIONS, SHORT | {"timeout": 0.2})))
    thread.start()
    wait_until(lambda: sum(rows(held)) == 1, "it is queued")
    if place == "running":
        held.gate.let(3)
    time.sleep(0.25)
    held.gate.open()
    thread.join()
    status, answer = answers[0]
    assert (status, answer["error"]["code"]) == (504, "deadline") and "0.2 s" in answer["error"]["message"]
    held.wait_idle()


def test_step_that_raises(held):
    """In-flight requests end with an error, streamed or not, queued or not; health and new requests get 503."""
    engine, answers = held.llm.engine, {}

    def ask(name, body):
        answers[name] = held.request("POST", COMPLETIONS, SHORT | body)

    threads = [threading.Thread(target=ask, args=item) for item in (("stream", {"stream": True}), ("whole", {}))]
    for place, thread in enumerate(threads):
        thread.start()
        wait_until(lambda place=place: sum(rows(held)) == place + 1, "it is queued")
        if not place:
            held.gate.let(2)

    def fail():
        raise RuntimeError("out of luck")

    engine.step = fail
    held.gate.open()
    for thread in threads:
        thread.join()
    last = json.loads(answers["stream"][2].split("data: ")[-1])
    assert answers["stream"][0] == 200 and last["error"]["code"] == "engine_dead"
    assert answers["whole"][0] == 503 and "out of luck" in answers["whole"][2]
    assert held.get("/health")[0] == 503 and held.post(COMPLETIONS, SHORT)[0] == 503
    assert held.metrics()["polytempo_engine_up"] == 0
    assert "out of luck" in json.loads(held.get("/status")[1])["failure"]


def test_step_that_hangs():
    llm, release = tiny_llm(), threading.Event()
    step = llm.engine.step
    with running(llm, step_timeout=0.4) as server:
        llm.engine.step = lambda: step() if release.wait(60) else None
        assert server.get("/health")[0] == 200
        events = server.events(COMPLETIONS, SHORT)
        assert events[-1]["error"]["code"] == "engine_dead" and "0.4 s" in events[-1]["error"]["message"]
        assert server.get("/health")[0] == 503 and server.post(COMPLETIONS, SHORT)[0] == 503
        # A step that returns after all does not bring the engine back to life.
        release.set()
        wait_until(lambda: server.front._thread.join(0.1), "its thread ends")
        assert server.get("/health")[0] == 503


def test_request_limits():
    with running(tiny_llm(), max_body_bytes=300, api_key="secret") as server:
        key = {"Authorization": "Bearer secret"}
        assert server.post(COMPLETIONS, SHORT, key)[0] == 200
        status, answer = server.post(COMPLETIONS, {"prompt": "x" * 400}, key)
        assert status == 413 and "300" in answer["error"]["message"]
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            status, answer = server.post(COMPLETIONS, SHORT, headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        for path in ("/metrics", "/status", "/v1/models", "/version", "/nowhere"):
            assert server.get(path)[0] == 401, path
        assert server.get("/health")[0] == 200 and server.get("/")[0] == 200
        headers = server.request("GET", "/health", headers={"Origin": "http://evil.example"})[1]
        assert not any(name.startswith("access-control") for name in headers)


def test_cors_when_asked():
    with running(tiny_llm(), allowed_origins=("http://good.example",)) as server:
        for origin, is_allowed in (("http://good.example", True), ("http://evil.example", False)):
            headers = server.request("GET", "/health", headers={"Origin": origin})[1]
            assert ("access-control-allow-origin" in headers) == is_allowed


def test_request_ids_and_logs(server, caplog):
    """Ids in header, body and log; prompts in the log only when asked for."""
    caplog.set_level("INFO", logger="polytempo.server")
    status, headers, text = server.request("POST", COMPLETIONS, SHORT | {"prompt": "sesame", "user": "ali"},
                                           {"X-Request-Id": "my.id-1"})  # fmt: skip
    assert headers["x-request-id"] == "my.id-1" and json.loads(text)["id"] == "cmpl-my.id-1"
    assert server.request("GET", "/health", headers={"X-Request-Id": "bad id\u00e9"})[1]["x-request-id"].isalnum()
    line = next(record.getMessage() for record in caplog.records if "my.id-1" in record.getMessage())
    assert "prompt_tokens=7" in line and "output_tokens=24" in line and "status=200" in line and "ali" in line
    assert "sesame" not in caplog.text
    with running(tiny_llm(), logs_prompts=True) as other:
        other.post(COMPLETIONS, SHORT | {"prompt": "sesame"})
    assert "sesame" in caplog.text


def test_memory_that_runs_out_sets_rows_back():
    """Rows that lose their state while they stream start over behind the scenes: the stream goes on, and is right."""
    llm = tiny_llm()
    gate = Gate(llm)
    gate.shut()
    with running(llm) as server:
        events = []
        thread = threading.Thread(target=lambda: events.extend(server.events(COMPLETIONS, SHORT)))
        thread.start()
        wait_until(lambda: llm.engine.has_work, "it is queued")
        for _ in range(3):
            gate.let(2)
            server.front._thread.call(llm.engine.scheduler._set_back_one).result(SOON)
        (row,) = llm.engine.scheduler.waiting
        assert row.num_set_back == 3 and row.output_token_ids
        gate.open()
        thread.join()
        server.wait_idle()
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == answer_alone()
