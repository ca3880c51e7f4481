"""Whatever is wrong with a request is said in OpenAI's form, with the field's name, and disturbs nobody."""

import json
import threading

import pytest
from server_support import tiny_llm

from polytempo.types import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def completion(**fields):
    return COMPLETIONS, {"prompt": "hi", "max_tokens": 2} | fields


def chat(**fields):
    return CHAT, {"messages": HELLO, "max_tokens": 2} | fields


# (path, body), status, param.
BAD = [
    (completion(suffix="x"), 400, "suffix"),
    (completion(best_of=2), 400, "best_of"),
    (completion(temprature=1), 400, "temprature"),
    (completion(temperature=-0.1), 400, "temperature"),
    (completion(temperature="hot"), 400, "temperature"),
    ((COMPLETIONS, '{"prompt": "hi", "temperature": NaN}'), 400, None),
    ((COMPLETIONS, '{"prompt": "hi", "temperature": 1e999}'), 400, "temperature"),
    ((COMPLETIONS, '{"prompt": "hi", "top_p": -Infinity}'), 400, None),
    ((COMPLETIONS, '{"prompt": "hi"'), 400, None),
    ((COMPLETIONS, "[1]"), 400, None),
    ((COMPLETIONS, "[" * 100_000), 400, None),
    (completion(top_p=0), 400, "top_p"),
    (completion(top_p=1.5), 400, "top_p"),
    (completion(top_k=-2), 400, "top_k"),
    (completion(top_k=2.5), 400, "top_k"),
    (completion(top_k=2**70), 200, None),  # above the vocabulary means the vocabulary, and above an int64 too
    (completion(draft_len=2**70), 200, None),
    (completion(max_tokens=2**70, stop=["\x00"], regex="a"), 200, None),
    (completion(priority=-(2**70)), 200, None),
    (completion(timeout=1e300), 200, None),
    (completion(stop_token_ids=[2**70]), 400, "stop_token_ids"),
    (completion(allowed_token_ids=[2**70]), 400, "allowed_token_ids"),
    (completion(logit_bias={"9" * 5000: 1}), 400, "logit_bias"),
    (completion(logit_bias={"9" * 18: 1}), 400, "logit_bias"),
    (completion(logit_bias={"\u00b2": 1}), 400, "logit_bias"),
    ((COMPLETIONS, '{"prompt": "hi", "max_tokens": ' + "9" * 5000 + "}"), 400, None),
    (completion(prompt="a\ud800"), 400, "prompt"),
    (completion(prompt=["a", "\udfff"]), 400, "prompt"),
    (completion(stop="\udc00"), 400, "stop"),
    (completion(bad_words=["\udc00"]), 400, "bad_words"),
    (completion(regex="\udc00"), 400, "regex"),
    (completion(grammar="\udc00"), 400, "grammar"),
    (chat(messages=[{"role": "user", "content": "\ud83d"}]), 400, "messages"),
    (("/tokenize", {"prompt": "\ud800"}), 400, "prompt"),
    (("/tokenize", {"messages": [{"role": "user", "content": "\ud800"}]}), 400, "messages"),
    (completion(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": False}}),
     400, "json_schema"),
    (completion(min_p=2), 400, "min_p"),
    (completion(max_tokens=0), 400, "max_tokens"),
    (completion(max_tokens=-1), 400, "max_tokens"),
    (completion(max_tokens=True), 400, "max_tokens"),
    (completion(min_tokens=3), 400, "min_tokens"),
    (completion(n=0), 400, "n"),
    (completion(n=10_000), 400, "n"),
    (completion(seed="7"), 400, "seed"),
    (completion(seed=2**70), 400, "seed"),
    (completion(repetition_penalty=0), 400, "repetition_penalty"),
    (completion(repetition_penalty=1e-320), 400, "repetition_penalty"),  # 0 as float32
    (completion(repetition_penalty=1e-30), 400, "repetition_penalty"),
    (completion(repetition_penalty=1e300), 400, "repetition_penalty"),
    (completion(repetition_penalty=1e-20), 200, None),
    (completion(repetition_penalty=1e20), 200, None),
    (completion(presence_penalty=3), 400, "presence_penalty"),
    (completion(frequency_penalty=-3), 400, "frequency_penalty"),
    (completion(logit_bias={"260": 1}), 400, "logit_bias"),
    (completion(logit_bias={"-1": 1}), 400, "logit_bias"),
    (completion(logit_bias={"5": 101}), 400, "logit_bias"),
    (completion(allowed_token_ids=[]), 400, "allowed_token_ids"),
    (completion(allowed_token_ids=[999]), 400, "allowed_token_ids"),
    (completion(stop_token_ids=[None]), 400, "stop_token_ids[0]"),
    (completion(stop=[""]), 400, "stop"),
    (completion(stop=[None]), 400, "stop"),
    (completion(bad_words=[""]), 400, "bad_words"),
    (completion(logprobs=999), 400, "logprobs"),
    (completion(logprobs=-1), 400, "logprobs"),
    (completion(draft_len=-1), 400, "draft_len"),
    (completion(prompt=""), 200, None),  # BOS alone: a prompt
    (completion(prompt=[]), 400, "prompt"),
    (completion(prompt=[[]]), 400, "prompt"),
    (completion(prompt=[260]), 400, "prompt"),
    (completion(prompt=[-1]), 400, "prompt"),
    (completion(prompt=["a", 1]), 400, "prompt"),
    (completion(prompt=None), 400, "prompt"),
    ((COMPLETIONS, {"max_tokens": 1}), 400, "prompt"),
    (completion(model="other"), 404, "model"),
    (completion(stream="yes"), 400, "stream"),
    (completion(stream_options={"include_usage": True}), 400, "stream_options"),
    (completion(stream=True, stream_options={"x": True}), 400, "stream_options.x"),
    (completion(timeout=0), 400, "timeout"),
    (completion(regex="a("), 400, "regex"),
    (completion(regex=""), 400, "regex"),
    (completion(regex="a{1000000}"), 400, "regex"),
    (completion(regex="(a{1,1000}){1000}"), 400, "regex"),
    (completion(grammar='start: "a"{100000}'), 400, "grammar"),
    (completion(grammar="start: nothing"), 400, "grammar"),
    (completion(grammar='start: "a"', regex="a"), 400, "grammar"),
    (completion(regex="a", ignore_eos=True), 400, "ignore_eos"),
    (completion(response_format={"type": "xml"}), 400, "response_format.type"),
    (completion(response_format={"type": "json_schema"}), 400, "response_format"),
    (completion(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "no"}}}),
     400, "json_schema"),
    (chat(tools=[]), 400, "tools"),
    (chat(tool_choice="auto"), 400, "tool_choice"),
    (chat(functions=[]), 400, "functions"),
    (chat(messages=[]), 400, "messages"),
    (chat(messages="hi"), 400, "messages"),
    (chat(messages=[{"role": "user"}]), 400, "messages[0].content"),
    (chat(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content"),
    (chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), 400, None),
    (chat(messages=[{"role": "bad", "content": "x"}]), 400, "messages"),
    (chat(top_logprobs=2), 400, "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (chat(logprobs=2), 400, "logprobs"),
    (chat(max_completion_tokens=3), 400, "max_completion_tokens"),
    (("/tokenize", {}), 400, "prompt"),
    (("/tokenize", {"prompt": "a", "messages": HELLO}), 400, "prompt"),
    (("/tokenize", {"text": "a"}), 400, "text"),
    (("/detokenize", {"tokens": [260]}), 400, "tokens"),
    (("/detokenize", {"tokens": ["a"]}), 400, "tokens[0]"),
]  # fmt: skip


def test_bad_bodies_while_two_good_streams_run(server):
    """Each refusal names its field, and two requests that stream meanwhile get what they get alone."""
    wanted = {"prompt": "good", "max_tokens": 60, "temperature": 0.8, "ignore_eos": True}
    alone = tiny_llm()
    streams: dict[int, list] = {}
    threads = [threading.Thread(target=lambda seed=seed: streams.update(
        {seed: server.events(COMPLETIONS, wanted | {"seed": seed})})) for seed in (1, 2)]  # fmt: skip
    for thread in threads:
        thread.start()
    for (path, body), status, param in BAD:
        if isinstance(body, dict) and path in (COMPLETIONS, CHAT) and status == 400 and len(str(body)) % 2:
            body = {"stream": True} | body  # streamed or not, nothing is sent before the refusal
        got, answer = server.post(path, body)
        assert got == status, (body, answer)
        if status != 200:
            error = answer["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["message"], body
            assert error["type"] == "invalid_request_error"
            assert param is None or error["param"] == param, (body, error)
            assert param is None or param.split(".")[-1].split("[")[0] in error["message"], (body, error)
    for thread in threads:
        thread.join()
    for seed, events in streams.items():
        params = SamplingParams(max_tokens=60, temperature=0.8, ignore_eos=True, seed=seed)
        expected = alone.generate("good", params, progress=False)[0].outputs[0].text
        assert events[-1] == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == expected
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_context_length(server, path):
    """Field case 44: too long a prompt is refused with both numbers; max_tokens beyond the context ends in 'length'."""
    limit = server.llm.engine.config.max_model_len
    template = 0 if path == COMPLETIONS else 2  # <|user|> and <|assistant|>; BOS is in both
    field = "prompt" if path == COMPLETIONS else "messages"

    def body(num_tokens, **fields):
        text = "x" * (num_tokens - 1 - template)
        prompt = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
        return prompt | {"temperature": 0, "ignore_eos": True} | fields

    for num_tokens in (limit, limit + 1):
        for stream in (False, True):
            status, answer = server.post(path, body(num_tokens, stream=stream))
            error = answer["error"]
            assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "context_length_exceeded")
            assert str(num_tokens) in error["message"] and str(limit) in error["message"]
            assert error["param"] == field
    for fields in ({"max_tokens": 10}, {}):
        status, answer = server.post(path, body(limit - 4, **fields))
        assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 4 and answer["usage"]["total_tokens"] == limit


def test_paths_methods_and_types(server):
    for method, path, status in (("GET", "/nowhere", 404), ("GET", COMPLETIONS, 405), ("POST", "/health", 405),
                                 ("GET", "/v1/models/other", 404)):  # fmt: skip
        got, headers, text = server.request(method, path)
        assert got == status and json.loads(text)["error"]["message"] and headers["x-request-id"]
    status, _, text = server.request("POST", COMPLETIONS, '{"prompt": "x"}', {"Content-Type": "text/plain"})
    assert status == 415 and "application/json" in json.loads(text)["error"]["message"]


def test_nan_is_no_json(server):
    """NaN is refused where JSON is read, before a field could repeat it in an error that is no JSON itself."""
    for constant in ("NaN", "Infinity", "-Infinity"):
        status, answer = server.post(COMPLETIONS, f'{{"prompt": "hi", "max_tokens": 1, "temperature": {constant}}}')
        assert status == 400 and "not valid JSON" in answer["error"]["message"] and constant in str(answer)
