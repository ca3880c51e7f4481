"""Grammars: the output is always in the language, and drafts, accepted or not, never change it."""

import json
import random
import re

import pytest
from byte_support import byte_tokenizer, tiny_llm, tiny_model

from polytempo.engine import step
from polytempo.engine.propose import ScriptedProposer
from polytempo.errors import RequestError
from polytempo.types import FinishReason, SamplingParams

TOY = 'start: "a" "b"* "c"'
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["x", "yy"]},
          "count": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["ok", "kind", "count"],
          "additionalProperties": False}  # fmt: skip


def run(llm, **options):
    params = SamplingParams(**{"max_tokens": 60, **options})
    return llm.generate("abc", params, progress=False)[0].outputs[0]


def answer(output):
    return output.token_ids, output.text, output.finish_reason, output.logprobs


@pytest.fixture(scope="module")
def plain():
    return tiny_llm(speculate="none")


@pytest.mark.parametrize(
    "constraint",
    [{"regex": "ab*c"}, {"grammar": TOY}, {"json_schema": SCHEMA}, {"regex": "é|(x|yz)+"}],
    ids=["regex", "grammar", "schema", "bytes"],
)
def test_output_is_in_the_language_and_equals_that_without_drafts(plain, constraint):
    llm, reached_end = tiny_llm(), 0
    for seed in range(3):
        for temperature in (0, 1.2):
            how = {**constraint, "temperature": temperature, "seed": seed, "logprobs": 0}
            expected = run(plain, **how)
            assert answer(run(llm, **how, draft_len=3)) == answer(expected)
            assert expected.error is None and expected.token_ids
            (fresh,) = plain.rows_of("abc", SamplingParams(**constraint))
            for place, token_id in enumerate(expected.token_ids):
                mask = fresh.grammar.mask_after(expected.token_ids[:place])
                assert mask[token_id // 8] >> token_id % 8 & 1, "a token that the grammar forbids"
            if expected.finish_reason is FinishReason.STOP:
                reached_end += 1
                assert expected.token_ids[-1] == 257
                if "json_schema" in constraint:
                    value = json.loads(expected.text)
                    assert list(value) == ["ok", "kind", "count"] and value["kind"] in ("x", "yy")
                else:
                    assert re.fullmatch(constraint.get("regex", "ab*c"), expected.text)
    assert reached_end >= 2, "hardly an output ends: nothing was tested"


@pytest.mark.parametrize("wrong_at", [0, 1, 2, None])
def test_rejected_drafts_do_not_advance_the_grammar(plain, wrong_at):
    """Drafts are the answer's own tokens with an illegal one at a place, or random legal and illegal ones."""
    expected = run(plain, regex="(a|b){20}c", temperature=1.0, seed=3)
    tokens, llm, rng = expected.token_ids, tiny_llm(draft_len=4), random.Random(1)
    a, b, c = (byte_tokenizer().encode(letter, False)[0] for letter in "abc")
    other = {a: b, b: a, c: a}

    def script(row, most):
        done = len(row.output_token_ids)
        drafts = list(tokens[done : done + most])
        for place in range(len(drafts)):
            if wrong_at is None:
                drafts[place] = rng.choice((drafts[place], other.get(drafts[place], 9), 9, 257))
            elif place == wrong_at:
                drafts[place] = rng.choice((9, 257, other.get(drafts[place], 9)))  # illegal, EOS, legal but another
        return drafts

    llm.engine.proposer = ScriptedProposer(script)
    output = run(llm, regex="(a|b){20}c", temperature=1.0, seed=3)
    assert answer(output) == answer(expected) and expected.finish_reason is FinishReason.STOP
    assert output.num_drafted > output.num_accepted and (wrong_at == 0 or output.num_accepted)


def test_mask_is_a_function_of_the_tokens():
    """Whatever was asked before, forwards and backwards, the mask after given tokens is that of a fresh matcher."""
    from polytempo.engine.grammar import GrammarCompiler

    compiled = GrammarCompiler(byte_tokenizer(), tiny_model().config).compile(SamplingParams(regex="(ab|ac){3}"))
    a, b, c = (byte_tokenizer().encode(letter, False)[0] for letter in "abc")
    state, rng = compiled.new_state(), random.Random(0)

    def allowed(mask):
        return None if mask is None else {i for i in range(260) if mask[i // 8] >> i % 8 & 1}

    assert allowed(state.mask_after([])) == {a} and allowed(state.mask_after([a])) == {b, c}
    assert allowed(state.mask_after([], [a, b, a, c, a])) == {b, c}
    assert allowed(state.mask_after([], [a, a])) is None and allowed(state.mask_after([a], [b, b, a])) is None
    assert allowed(state.mask_after([a, b] * 3)) == {257} and state.mask_after([a, b] * 3, [257]) is None
    for _ in range(200):
        tokens = [rng.choice((a, b, c)) for _ in range(rng.randrange(7))]
        cut = rng.randrange(len(tokens) + 1)
        assert allowed(state.mask_after(tokens[:cut], tokens[cut:])) == allowed(compiled.new_state().mask_after(tokens))


def test_rows_of_one_request_have_grammars_of_their_own(plain):
    params = SamplingParams(regex="[a-z]{4}", temperature=1.5, seed=5, n=4, max_tokens=9)
    outputs = tiny_llm().generate("abc", params, progress=False)[0].outputs
    assert len({output.text for output in outputs}) > 1 and all(re.fullmatch("[a-z]{4}", o.text) for o in outputs)


def test_json_object_and_other_options_together(plain):
    """The grammar comes after allowed_token_ids and before bad words; nothing left is an error of the request alone."""
    llm = tiny_llm()
    mark, brace = (byte_tokenizer().encode(text, False)[0] for text in "!}")
    output = run(llm, regex="[xyz]+!", bad_words=["x"], logit_bias={mark: 4.0}, seed=1)
    assert "x" not in output.text and set(output.text) <= set("yz!")
    failed = run(llm, regex="a", min_tokens=5)
    assert failed.finish_reason is FinishReason.ERROR and "leave no token" in failed.error
    text = run(llm, json_object=True, temperature=0, logit_bias={brace: 60.0}).text
    assert json.loads(text) == {}


@pytest.mark.parametrize(("options", "name"), [
    ({"regex": "a("}, "regex"), ({"grammar": "start: x"}, "grammar"), ({"json_schema": {"type": "no"}}, "json_schema"),
    ({"json_schema": "{"}, "json_schema"), ({"json_schema": "[1]"}, "json_schema"), ({"regex": ""}, "regex"),
    ({"regex": "a", "json_object": True}, "regex"), ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"json_object": 1}, "json_object"), ({"regex": "a{1000000}"}, "regex"), ({"regex": "(a{1,1000}){1000}"}, "regex"),
    ({"grammar": 'start: "a"{100000}'}, "grammar"),
])  # fmt: skip
def test_refusals_name_the_option(plain, options, name):
    with pytest.raises(RequestError, match=name) as caught:
        plain.check("abc", SamplingParams(**options))
    assert caught.value.param == name


def test_without_a_tokenizer():
    from polytempo.llm import LLM

    with pytest.raises(RequestError, match="needs a tokenizer"):
        LLM.from_model(tiny_model(), None, max_rows=1, max_model_len=64).check([1, 2], SamplingParams(regex="a"))


def test_drafts_are_drawn_under_the_grammar():
    """The proposer sees the same masks: no draft of the MTP block is one that the grammar forbids."""
    llm, num_checked = tiny_llm(draft_len=3), 0
    propose = llm.engine.proposer.propose

    def checked(rows, streams, draft_lens, are_kept):
        nonlocal num_checked
        propose(rows, streams, draft_lens, are_kept)
        for row in (item.row for item in rows):
            drafts = row.drafts[: row.drafts.index(257)] if 257 in row.drafts else row.drafts
            assert row.grammar.mask_after(row.output_token_ids, drafts) is not None
            num_checked += len(drafts)

    llm.engine.proposer.propose = checked
    output = run(llm, regex="((ab|cd)e){1,8}", temperature=1.0, seed=2)
    assert num_checked > 10 and re.fullmatch("((ab|cd)e)*", output.text) and output.num_accepted > 3


def test_grammar_that_gives_up_fails_its_request_alone(plain):
    """llguidance stops at grammars that become too complex while they run; the row ends with its reason."""
    llm = tiny_llm()
    alone = llm.generate("abc", SamplingParams(temperature=0, max_tokens=9), progress=False)[0].outputs[0].text

    class GivesUp:
        def is_error(self):
            return True

        def get_error(self):
            return "too many items"

    rows = llm.rows_of("abc", SamplingParams(regex="a*", max_tokens=9))
    rows[0].grammar._matcher = GivesUp()
    neighbour = llm.rows_of("abc", SamplingParams(temperature=0, max_tokens=9))
    for one in (rows, neighbour):
        llm.engine.add(one)
    while llm.engine.has_work:
        llm.engine.step()
    assert rows[0].finish_reason is FinishReason.ERROR and "too many items" in rows[0].error
    assert neighbour[0].text.text == alone and neighbour[0].error is None


def test_row_set_back_between_draft_and_verify(plain):
    """Field case 34: a constrained row that loses its state with drafts pending starts over to the same output."""
    how = {"regex": "(ab|cd){12}", "temperature": 1.0, "seed": 4, "logprobs": 0}
    expected = run(plain, **how)
    llm = tiny_llm(draft_len=3)
    (row,) = llm.rows_of("abc", SamplingParams(max_tokens=60, **how))
    llm.engine.add([row])
    num_set_back = 0
    while llm.engine.has_work:
        llm.engine.step()
        if row.drafts and num_set_back < 2 and len(row.output_token_ids) > 5 * (num_set_back + 1):
            llm.engine.scheduler._set_back_one()
            num_set_back += 1
    assert num_set_back == 2 and row.num_set_back == 2
    assert row.output_token_ids == list(expected.token_ids) and row.text.text == expected.text
    assert expected.finish_reason is FinishReason.STOP and row.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_rows_go_on_beside_one_that_starts_over(kernels, monkeypatch):
    """Its options run out behind accepted drafts. Of its streams nothing is kept then, of others' all."""
    (allowed,) = byte_tokenizer().encode("a", add_special_tokens=False)
    ends = SamplingParams(temperature=0.0, max_tokens=40, regex="a{11}b", allowed_token_ids=[allowed])
    plain = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, draft_len=0)
    drafting = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts, params = ["abc", "neighbour", "another"], [ends, plain, drafting]
    expected = [tiny_llm(speculate="none", kernels=kernels).generate([prompt], [one], progress=False)[0].outputs[0]
                for prompt, one in zip(prompts, params, strict=True)]  # fmt: skip
    llm, over = tiny_llm(draft_len=3, kernels=kernels), []
    start_over = step._start_over
    monkeypatch.setattr(step, "_start_over", lambda target, row: (over.append(row), start_over(target, row)))
    for _ in range(2):
        found = [output.outputs[0] for output in llm.generate(prompts, params, progress=False)]
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert found[0].finish_reason is FinishReason.ERROR and len(found[0].token_ids) == 11
    assert len(over) == 2
