"""Streams say exactly what whole answers say: text, choices, log-probabilities, usage. Field cases 40 to 47."""

import pytest
import torch
from server_support import byte_tokenizer, tiny_model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def prompt_of(path, text):
    return {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}


def texts(events, count=1):
    """Joined text by index, and the finish reasons by index."""
    joined, reasons = [""] * count, [[] for _ in range(count)]
    for event in events[:-1]:
        for choice in event["choices"]:
            index = choice["index"]
            assert not reasons[index], "a delta after the finish"
            joined[index] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            if choice["finish_reason"] is not None:
                reasons[index].append(choice["finish_reason"])
    return joined, reasons


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 2])
def test_usage_chunk(server, path, n):
    """Field case 40: if asked for, it is one last chunk without choices, equal to the whole answer's."""
    body = prompt_of(path, "abc") | {"max_tokens": 5, "temperature": 0.5, "seed": 1, "n": n}
    whole = server.post(path, body)[1]
    for options in ({"include_usage": True}, {"include_usage": False}, {}, None):
        events = server.events(path, body | ({} if options is None else {"stream_options": options}))
        assert events[-1] == "[DONE]"
        with_usage = [event for event in events[:-1] if event.get("usage")]
        if options == {"include_usage": True}:
            assert with_usage == [events[-2]] and events[-2]["choices"] == []
            assert events[-2]["usage"] == whole["usage"]
        else:
            assert not with_usage and all(event["choices"] for event in events[:-1])


def test_choices_that_end_apart(server):
    """Field case 47: three choices ending at different times, each with one finish, nothing after it."""
    body = prompt_of(COMPLETIONS, "abc") | {"max_tokens": 24, "temperature": 1.5, "n": 3, "stop": ["a", "b"]}
    for seed in range(30):
        whole = server.post(COMPLETIONS, body | {"seed": seed})[1]
        if len({choice["finish_reason"] for choice in whole["choices"]}) == 2:
            break
    else:
        raise AssertionError("no seed makes the choices end differently")
    joined, reasons = texts(server.events(COMPLETIONS, body | {"seed": seed}), 3)
    assert joined == [choice["text"] for choice in whole["choices"]]
    assert reasons == [[choice["finish_reason"]] for choice in whole["choices"]]
    assert whole["usage"]["prompt_tokens"] == 4


def scripted(text: str):
    """logit_bias cannot order tokens; a grammar can: an answer that is exactly this text."""
    from json import dumps

    return {"grammar": f"start: {dumps(text, ensure_ascii=False)}", "temperature": 0}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_characters_stay_whole(server, path):
    """Field case 41: emoji and CJK of several tokens each; one U+FFFD only for a character that max_tokens cuts."""
    text = "é中文🙂🙃"
    data = text.encode()
    for draft_len in (0, 3):
        body = prompt_of(path, "abc") | scripted(text) | {"draft_len": draft_len}
        events = server.events(path, body)
        assert texts(events)[0] == [text] and len(events) > 5
        assert not any("\ufffd" in str(event) for event in events)
        cut = server.events(path, body | {"max_tokens": len(data) - 2})
        assert texts(cut) == (["é中文🙂\ufffd"], [["length"]])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_stop_strings_never_leak(server, path):
    """Field case 42: no part of the matched stop is ever sent; a near miss is, in full."""
    body = prompt_of(path, "abc") | scripted("the own fog and a brown fox jumps") | {"stop": ["own fox"]}
    events = server.events(path, body)
    (joined,), reasons = texts(events)
    assert joined == "the own fog and a br" and reasons == [["stop"]]
    pieces = [c["text"] if "text" in c else c["delta"].get("content", "") for e in events[:-1] for c in e["choices"]]
    assert "the" == "".join(pieces)[:3] and len([piece for piece in pieces if piece]) > 3
    assert server.post(path, body)[1]["choices"][0]["stop_reason"] == "own fox"


def teacher_forced(ids):
    """Log-probabilities of ids[1:] by one forward over all of them."""
    from support import Harness

    logits = Harness(tiny_model()).prefill(ids, [len(ids)])
    return torch.log_softmax(logits.double(), -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()


@pytest.mark.parametrize("logprobs", [0, 3])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_with_logprobs(server, logprobs, max_tokens):
    """Field case 46: prompt and output together; the first null, the others the model's own; offsets in characters."""
    text = "aé🙂 b"
    body = {"prompt": text, "echo": True, "logprobs": logprobs, "max_tokens": max_tokens, "temperature": 0}
    whole = server.post(COMPLETIONS, body)[1]
    choice, tokenizer = whole["choices"][0], byte_tokenizer()
    assert choice["text"].startswith(text) and whole["usage"]["completion_tokens"] == max_tokens
    ids = tokenizer.encode(text)
    written = choice["logprobs"]
    assert {len(column) for column in written.values()} == {len(ids) + max_tokens}
    assert written["token_logprobs"][0] is None and written["top_logprobs"][0] is None
    assert written["token_logprobs"][1 : len(ids)] == pytest.approx(teacher_forced(ids), abs=1e-4)
    # BOS has no text; é is two tokens and the emoji four, whose text comes with the last.
    assert written["text_offset"][: len(ids)] == [0, 0, 1, 1, 2, 2, 2, 2, 3, 4]
    assert written["text_offset"][len(ids) : len(ids) + 1] == [len(text)][:max_tokens]
    events = server.events(COMPLETIONS, body)
    assert texts(events)[0] == [choice["text"]]
    columns = [event["choices"][0]["logprobs"] for event in events[:-1]]
    assert {name: [v for c in columns if c for v in c[name]] for name in written} == written
    plain = server.post(COMPLETIONS, body | {"logprobs": None, "stream": False})[1]["choices"][0]
    assert plain["text"] == choice["text"] and plain["logprobs"] is None


@pytest.mark.parametrize("speculate", ["mtp", "none"])
def test_cached_tokens(speculate):
    """Field case 49: a prompt that comes again is partly known, the answer the same, and prompt_tokens unchanged."""
    from server_support import running, tiny_llm

    body = {"prompt": "x" * 200, "max_tokens": 6, "temperature": 0.7, "seed": 2}
    with running(tiny_llm(speculate=speculate, prefix_cache=2**26)) as server:
        first, second = (server.post(COMPLETIONS, body)[1] for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert second["choices"] == first["choices"]
    assert second["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"] == 201
