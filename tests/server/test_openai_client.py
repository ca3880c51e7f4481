"""The openai package, sync and async, and curl, against a running server."""

import asyncio
import json
import shutil
import subprocess
import threading

import openai
import pytest

from polytempo.types import SamplingParams

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def offline(server, prompt, **options):
    """The same request through the Python API, on an engine of its own."""
    from server_support import tiny_llm

    params = SamplingParams(**{"max_tokens": None, **options})
    return tiny_llm(max_model_len=server.llm.engine.config.max_model_len).generate(prompt, params, progress=False)[0]


def test_completions(server, client):
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=9, temperature=0.7, seed=5, n=2,
                                       stop=["\x00\x00"], logprobs=2)  # fmt: skip
    expected = offline(server, "abc", max_tokens=9, temperature=0.7, seed=5, n=2, stop=["\x00\x00"], logprobs=2)
    assert [choice.text for choice in answer.choices] == [output.text for output in expected.outputs]
    assert [choice.finish_reason for choice in answer.choices] == [str(o.finish_reason) for o in expected.outputs]
    for choice, output in zip(answer.choices, expected.outputs, strict=True):
        assert choice.logprobs.token_logprobs == [
            entry[token_id].logprob for entry, token_id in zip(output.logprobs, output.token_ids, strict=True)
        ]
    assert answer.usage.prompt_tokens == 4 and answer.usage.completion_tokens == expected.num_output_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_several_prompts(server, client):
    prompts = ["one", "three", [256, 5, 6]]
    for prompt in (prompts[:2], [[256, 1], [256, 2, 3]]):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=5, temperature=0, n=2)
        one_by_one = [offline(server, p if isinstance(p, str) else {"prompt_token_ids": p}, max_tokens=5,
                              temperature=0).outputs[0].text for p in prompt]  # fmt: skip
        assert [c.index for c in answer.choices] == [0, 1, 2, 3]
        assert [c.text for c in answer.choices] == [one_by_one[0]] * 2 + [one_by_one[1]] * 2
    assert client.completions.create(model="tiny", prompt=prompts[2], max_tokens=1).usage.prompt_tokens == 3


def test_chat_with_every_option(server, client):
    options = {"temperature": 0.9, "top_p": 0.9, "seed": 11, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    extra = {"top_k": 40, "min_p": 0.001, "repetition_penalty": 1.1, "bad_words": ["e"], "min_tokens": 3,
             "stop_token_ids": [7], "draft_len": 1, "allowed_token_ids": list(range(1, 255)), "ignore_eos": True,
             "skip_special_tokens": False, "include_stop_str_in_output": True}  # fmt: skip
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=12, logit_bias={"40": 5}, stop="zz", logprobs=True,
        top_logprobs=3, extra_body=extra, **options,
    )  # fmt: skip
    ids = server.llm.tokenizer.apply_chat_template(MESSAGES)
    expected = offline(server, {"prompt_token_ids": ids}, max_tokens=12, logit_bias={40: 5}, stop="zz", logprobs=3,
                       **options, **extra).outputs[0]  # fmt: skip
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    content = choice.logprobs.content
    assert [one.logprob for one in content] == [
        entry[token_id].logprob for entry, token_id in zip(expected.logprobs, expected.token_ids, strict=True)
    ]
    assert all(len(one.top_logprobs) == 3 for one in content)
    assert all(one.bytes is None or bytes(one.bytes).decode() == one.token for one in content)


@pytest.mark.parametrize("draft_len", [0, 2])
def test_constrained_output(server, client, draft_len):
    """response_format and regex are the same constraints as the Python API's, with drafts and without."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}},
              "required": ["ok", "n"], "additionalProperties": False}  # fmt: skip
    ids = server.llm.tokenizer.apply_chat_template(MESSAGES)
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "temperature": 1.0, "seed": 8}
    plain = {"max_tokens": 40, "temperature": 1.0, "seed": 8, "draft_len": 0}
    kind = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(response_format=kind, extra_body={"draft_len": draft_len}, **options)
    text = answer.choices[0].message.content
    assert set(json.loads(text)) == {"ok", "n"} and answer.choices[0].finish_reason == "stop"
    assert text == offline(server, {"prompt_token_ids": ids}, json_schema=schema, **plain).outputs[0].text
    answer = client.chat.completions.create(extra_body={"regex": "[a-c]{5}", "draft_len": draft_len}, **options)
    text = answer.choices[0].message.content
    assert len(text) == 5 and set(text) <= set("abc")
    assert text == offline(server, {"prompt_token_ids": ids}, regex="[a-c]{5}", **plain).outputs[0].text
    answer = client.chat.completions.create(response_format={"type": "json_object"}, **options)
    assert answer.choices[0].message.content.startswith("{")
    free = client.chat.completions.create(response_format={"type": "text"}, **options).choices[0].message.content
    assert free == offline(server, {"prompt_token_ids": ids}, **plain).outputs[0].text


def test_every_option_is_sent_on():
    """An option of SamplingParams that the server does not take, or takes and drops, is a fault."""
    from dataclasses import fields

    from polytempo.server.protocol import _SAMPLING_FIELDS

    elsewhere = {"logprobs", "prompt_logprobs", "logit_bias", "json_object", "json_schema", "detokenize"}
    assert set(_SAMPLING_FIELDS) == {field.name for field in fields(SamplingParams)} - elsewhere


def test_streams(server, client):
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=30, temperature=0)
    with client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=30, temperature=0, stream=True,
                                        stream_options={"include_usage": True}) as stream:  # fmt: skip
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 5 and chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_async_clients_at_once(server):
    async def ask():
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        return await asyncio.gather(*(
            client.completions.create(model="tiny", prompt="p" * n, max_tokens=6, temperature=0) for n in range(1, 9)
        ))  # fmt: skip

    answers = asyncio.run(ask())
    assert [a.choices[0].text for a in answers] == [
        offline(server, "p" * n, max_tokens=6, temperature=0).outputs[0].text for n in range(1, 9)
    ]


def test_errors(server, client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[{"type": "function", "function":
                                       {"name": "f", "parameters": {}}}])  # fmt: skip
    assert caught.value.param == "tools" and caught.value.status_code == 400
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", suffix="y")
    assert caught.value.param == "suffix"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found"
    assert [model.id for model in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"


def test_tokenize(server):
    status, answer = server.post("/tokenize", {"prompt": "héllo"})
    assert status == 200 and answer["count"] == len(answer["tokens"]) == 7 and answer["tokens"][0] == 256
    assert server.post("/detokenize", {"tokens": answer["tokens"][1:]})[1] == {"prompt": "héllo"}
    chat = server.post("/tokenize", {"messages": MESSAGES})[1]["tokens"]
    assert chat == server.llm.tokenizer.apply_chat_template(MESSAGES)
    assert len(server.post("/tokenize", {"prompt": "abc", "add_special_tokens": False})[1]["tokens"]) == 3
    assert json.loads(server.get("/version")[1])["version"]


def test_text_is_tokenised_beside_the_event_loop(server, monkeypatch):
    """There it would hold up every stream, and /health."""
    threads, encode = [], type(server.llm.tokenizer)._ids

    def spy(self, *args):
        threads.append(threading.current_thread())
        return encode(self, *args)

    monkeypatch.setattr(type(server.llm.tokenizer), "_ids", spy)
    for path, body in (("/tokenize", {"prompt": "ab"}), ("/tokenize", {"messages": MESSAGES}),
                       ("/v1/completions", {"prompt": "ab", "max_tokens": 1}),
                       ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})):  # fmt: skip
        threads.clear()
        assert server.post(path, body)[0] == 200
        assert threads and server.thread not in threads, path


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server):
    body = json.dumps({"prompt": "abc", "max_tokens": 4, "temperature": 0, "stream": True})
    command = ["curl", "-sSN", "--fail-with-body", f"{server.url}/v1/completions", "-H",
               "Content-Type: application/json", "-d", body]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    assert text == offline(server, "abc", max_tokens=4, temperature=0).outputs[0].text
