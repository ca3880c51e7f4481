"""Counters equal what a scripted run adds up to by hand."""

from server_support import Gate, open_request, running, tiny_llm, wait_until

from polytempo.engine.propose import ScriptedProposer
from polytempo.types import SamplingParams

COMPLETIONS = "/v1/completions"
GREEDY = {"temperature": 0, "ignore_eos": True}


def test_counters_of_a_scripted_run():
    """Drafts that are the target's own tokens but for every second place: 3 drafted, 1 accepted in each full step."""
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    tokens = tiny_llm(draft_len=0).generate("abc", params, progress=False)[0].outputs[0].token_ids
    llm = tiny_llm(draft_len=3)

    def script(row, most):
        done = len(row.output_token_ids)
        ahead = tokens[done : done + most]
        return [*ahead[:1], *((token_id + 1) % 256 for token_id in ahead[1:])]

    llm.engine.proposer = ScriptedProposer(script)
    with running(llm) as server:
        assert server.post(COMPLETIONS, GREEDY | {"prompt": "abc", "max_tokens": 9, "n": 2})[0] == 200
        assert server.post(COMPLETIONS, GREEDY | {"prompt": "abc", "max_tokens": 0})[0] == 400
        gate = Gate(llm)
        gate.shut()
        client = open_request(server, COMPLETIONS, GREEDY | {"prompt": "abc", "max_tokens": 9})
        wait_until(lambda: llm.engine.has_work, "it is queued")
        gate.let(1)
        client.close()
        wait_until(lambda: not llm.engine.has_work, "it is gone")
        gate.open()
        abandoned = 'polytempo_choices_total{finish_reason="abandoned"}'
        wait_until(lambda: abandoned in server.metrics(), "it is counted")
        seen = server.metrics()
    # By hand, each choice: 1 token from the prompt's step, then 3, 3, 3 and 1 drafts (there is room for no more), of
    # which 1 is accepted each time: 1 + 2 + 2 + 2 + 2 tokens. The second choice takes the first one's prompt, and so is
    # a step behind.
    expected = {
        'polytempo_choices_total{finish_reason="length"}': 2,
        'polytempo_choices_total{finish_reason="abandoned"}': 1,
        "polytempo_prompt_tokens_total": 4 + 4,
        "polytempo_output_tokens_total": 9 + 9 + 1,
        "polytempo_drafted_tokens_total": 2 * (3 + 3 + 3 + 1),
        "polytempo_accepted_tokens_total": 2 * 4,
        "polytempo_verifies_total": 2 * 5 + 1,
        "polytempo_steps_total": 6 + 1,
        "polytempo_ttft_seconds_count": 3,
        "polytempo_tpot_seconds_count": 2,
        "polytempo_request_seconds_count": 2,
        "polytempo_rows_running": 0,
        "polytempo_rows_waiting": 0,
        "polytempo_seats": 4,
        "polytempo_engine_up": 1,
        'polytempo_http_responses_total{path="/v1/completions",status="200"}': 1,
        'polytempo_http_responses_total{path="/v1/completions",status="400"}': 1,
    }
    assert {name: seen.get(name) for name in expected} == expected
