"""What the server answers to many clients at once is what the Python API answers to each request alone."""

import asyncio
import os
import random

import pytest
from server_support import open_request, running, tiny_llm

from polytempo.async_llm import AsyncLLM
from polytempo.types import SamplingParams


def cases(count: int, seed: int, longest: int = 140) -> list[tuple[dict, float]]:
    """Request bodies of every kind, and when to send each."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        body = {"prompt": [rng.randrange(2, 256) for _ in range(rng.choice((1, 3, 9, 33, 60, longest)))],
                "max_tokens": rng.randrange(1, 14), "seed": number, "logprobs": 0,
                "temperature": rng.choice((0, 0, 0.7, 1.3))}  # fmt: skip
        body |= rng.choice(({}, {"top_k": 20}, {"top_p": 0.8}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.3},
                            {"min_tokens": 1}, {"logit_bias": {"5": 8}}, {"stop": ["a"]}, {"n": 2},
                            {"regex": "[ab]{3}c*"}, {"draft_len": 0}, {"draft_len": 3}))  # fmt: skip
        made.append((body, rng.random() * count / 40))
    return made


def expected(llm, body: dict):
    options = {name: value for name, value in body.items() if name not in ("prompt", "draft_len")}
    if "logit_bias" in options:
        options["logit_bias"] = {int(key): bias for key, bias in options["logit_bias"].items()}
    output = llm.generate({"prompt_token_ids": body["prompt"]}, SamplingParams(**options), progress=False)[0]
    return [(choice.text, str(choice.finish_reason),
             [entry[token_id].logprob for entry, token_id in zip(choice.logprobs, choice.token_ids, strict=True)])
            for choice in output.outputs]  # fmt: skip


async def ask_all(server, made, num_clients: int) -> list:
    """Every body through a fixed number of clients; every second one streams."""
    import openai

    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=600)
    free = asyncio.Semaphore(num_clients)

    async def ask(number, body, delay):
        await asyncio.sleep(delay)
        known = {"prompt", "max_tokens", "seed", "logprobs", "temperature", "top_p", "presence_penalty", "logit_bias",
                 "stop", "n"}  # fmt: skip
        options = {name: value for name, value in body.items() if name in known}
        extra = {name: value for name, value in body.items() if name not in known}
        async with free:
            answer = await client.completions.create(model="tiny", stream=number % 2 == 1, extra_body=extra, **options)
            chunks = [chunk async for chunk in answer] if number % 2 else [answer]
        parts = [("", None, []) for _ in range(body.get("n", 1))]
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            text, reason, logprobs = parts[choice.index]
            parts[choice.index] = (text + choice.text, reason or choice.finish_reason,
                                   logprobs + choice.logprobs.token_logprobs)  # fmt: skip
        return parts

    return await asyncio.gather(*(ask(number, *case) for number, case in enumerate(made)))


def check(count: int, num_clients: int, longest: int = 140, **options) -> None:
    made = cases(count, count, longest)
    alone = tiny_llm(max_rows=1, speculate="none", queue_limit=None)
    with running(tiny_llm(queue_limit=count * 2, mixed_prompt_tokens=24, **options)) as server:
        answers = asyncio.run(ask_all(server, made, num_clients))
        server.wait_idle()
    wrong = [number for number, (case, answer) in enumerate(zip(made, answers, strict=True))
             if answer != expected(alone, case[0])]  # fmt: skip
    assert not wrong, f"{len(wrong)} of {count} differ, the first is {made[wrong[0]][0]}"


@pytest.mark.parametrize("speculate", ["mtp", "none"])
def test_staggered_clients(speculate):
    check(20, 8, longest=70, speculate=speculate)


@pytest.mark.long
@pytest.mark.parametrize("speculate", ["mtp", "none"])
def test_500_requests_from_64_clients(speculate):
    """POLYTEMPO_REQUESTS changes the 500."""
    check(int(os.environ.get("POLYTEMPO_REQUESTS", "500")), 64, speculate=speculate, max_rows=16)


def test_async_generate_and_cancellation():
    """AsyncLLM without HTTP: deltas add up, and a task that is cancelled frees its seat."""
    llm = tiny_llm()
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=4, ignore_eos=True)
    alone = tiny_llm().generate("abc", params, progress=False)[0].outputs[0]

    async def main():
        front = AsyncLLM(llm)
        await front.start()
        deltas = [delta async for delta in front.generate("abc", params)]
        assert "".join(delta.text for delta in deltas) == alone.text
        assert tuple(t for delta in deltas for t in delta.token_ids) == alone.token_ids
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [alone.finish_reason]
        begun = asyncio.Event()

        async def consume():
            async for _ in front.generate("abc", SamplingParams(max_tokens=200, ignore_eos=True)):
                begun.set()

        task = asyncio.create_task(consume())
        await begun.wait()
        assert front.num_unfinished_rows == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert front.num_unfinished_rows == 0
        await front.ping()
        await front.ping()  # the command before was the abort
        assert llm.engine.scheduler.num_free_slots == 4 and not llm.engine.has_work
        await front.close()

    asyncio.run(main())


def test_choices_among_clients_that_vanish_and_deadlines():
    """n > 1 with stop strings, grammars, log-probabilities and long prompts, while other clients leave."""
    rng = random.Random(3)
    kinds = ({"stop": ["a", "bc", " "]}, {"stop": ["\ufffd"]}, {"logprobs": 3}, {"regex": "[ab]{2,9}"},
             {"grammar": 'start: "x" start | "y"'}, {"stop": ["aa"], "include_stop_str_in_output": True},
             {"bad_words": ["a", "b"]}, {"regex": "(ab|cd)*", "stop": ["cd"]})  # fmt: skip
    bodies = [{"prompt": rng.choice(("abc", "x" * rng.randrange(1, 180), "é€😀" * rng.randrange(1, 12))),
               "n": rng.choice((2, 3, 5)), "seed": number, "temperature": 1.2, "max_tokens": rng.choice((1, 2, 16)),
               "logprobs": 0} | kinds[number % len(kinds)] for number in range(16)]  # fmt: skip
    alone = tiny_llm(max_rows=1, speculate="none", queue_limit=None)
    with running(tiny_llm(queue_limit=200, mixed_prompt_tokens=24, draft_len=3)) as server:
        for number, body in enumerate(bodies):
            nuisance = {"prompt": "x" * rng.randrange(1, 150), "n": rng.choice((1, 4, 8)), "ignore_eos": True}
            left = open_request(server, "/v1/completions", nuisance | {"stream": bool(number % 2), "max_tokens": 50})
            late = open_request(server, "/v1/completions", nuisance | {"timeout": rng.choice((0.001, 0.02, 0.1))})
            status, answer = server.post("/v1/completions", body)
            left.close()
            assert status == 200, answer
            parts = [(choice["text"], choice["finish_reason"], choice["logprobs"]["token_logprobs"])
                     for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]  # fmt: skip
            options = {name: value for name, value in body.items() if name != "prompt"}
            output = alone.generate(body["prompt"], SamplingParams(**options), progress=False)[0]
            assert parts == [(choice.text, str(choice.finish_reason), [
                entry[token_id].logprob for entry, token_id in zip(choice.logprobs, choice.token_ids, strict=True)
            ]) for choice in output.outputs], body  # fmt: skip
            assert answer["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
            late.close()
        server.wait_idle()
        sharing = server.llm.engine.sharing
        assert sharing.num_rows > 10 and sharing.num_kept == 0
