"""Load for locust on a running OpenAI-compatible server: a fixed number of requests, streamed and whole, of both kinds.

locust -f tests/server/locustfile.py --headless -u 8 -r 8 --requests 64 --host http://127.0.0.1:8000

Beside the requests, locust's table gets rows of type TTFT, whose times are those of streams' first events, and of type
TOKENS, whose "content length" is what each answer's `usage` says, and one of type AT ONCE, whose "times" are how many
requests were open when one was sent.
"""

import itertools
import json
import time

import gevent
from gevent.event import Event
from locust import HttpUser, events, task
from locust.exception import StopUser

PROMPTS = ("import os\n", "def add(a, b):\n    return", "class Row:\n", "for place in range(")
EVERYBODY_IS_HERE = Event()


@events.init_command_line_parser.add_listener
def add_options(parser):
    parser.add_argument("--requests", type=int, default=64, help="How many in all.")
    parser.add_argument("--max-tokens", type=int, default=24, help="Output tokens of each; EOS is ignored.")


@events.spawning_complete.add_listener
def let_them_start(**_):
    EVERYBODY_IS_HERE.set()


class Client(HttpUser):
    numbers, num_done, num_open = itertools.count(), 0, 0

    def on_start(self):
        EVERYBODY_IS_HERE.wait()

    @task
    def ask(self):
        options, number = self.environment.parsed_options, next(Client.numbers)
        if number >= options.requests:
            raise StopUser
        is_chat, streams, text = number % 2 == 1, number // 2 % 2 == 1, PROMPTS[number // 4 % len(PROMPTS)]
        body = {"max_tokens": options.max_tokens, "temperature": 0.8, "seed": number, "ignore_eos": True}
        body |= {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        if streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        Client.num_open += 1
        self.count("AT ONCE", "requests", 0, Client.num_open)
        try:
            self.send(path, body, streams)
        finally:
            Client.num_open -= 1
            Client.num_done += 1
            if Client.num_done == options.requests:
                # Not from here: quit kills its caller where another client is still to be stopped, and then never ends.
                gevent.spawn(self.environment.runner.quit)

    def send(self, path, body, streams):
        started = time.perf_counter()
        name = f"{path}{' stream' if streams else ''}"
        with self.client.post(path, json=body, stream=streams, name=name, catch_response=True) as answer:
            if answer.status_code != 200:
                answer.failure(f"{answer.status_code}: {answer.text[:200]}")
                return
            usage = self.read(answer, started) if streams else answer.json()["usage"]
            if usage is None or usage["completion_tokens"] != body["max_tokens"]:
                answer.failure(f"{body['max_tokens']} tokens were asked for, usage is {usage}")
                return
            self.count("TOKENS", "prompt", usage["prompt_tokens"])
            self.count("TOKENS", "output", usage["completion_tokens"])

    def read(self, answer, started):
        """The usage of a stream that ended with [DONE], else None."""
        first = usage = None
        for line in answer.iter_lines(chunk_size=1):
            if line == b"data: [DONE]":
                self.count("TTFT", answer.request_meta["name"], 0, first)
                return usage
            if line:
                event = json.loads(line.removeprefix(b"data: "))
                first = first or 1e3 * (time.perf_counter() - started)
                usage = event.get("usage") or usage
        return None

    def count(self, kind, name, amount, milliseconds=0.0):
        self.environment.events.request.fire(
            request_type=kind, name=name, response_time=milliseconds, response_length=amount, exception=None, context={}
        )
