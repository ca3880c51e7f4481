"""Doubles for tests of speculation: the oracle, scripts that dictate acceptance, and a record of what each step did."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from support import ENGINE, TINY, Harness, random_ids, random_model

from polytempo.cache.layout import Segment
from polytempo.engine.propose import CaughtUp, MTPProposer, ScriptedProposer
from polytempo.engine.row import Row
from polytempo.engine.sampling import sample
from polytempo.engine.sampling_position import SamplingPosition
from polytempo.llm import LLM
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.types import FinishReason, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, logprobs=2)
LENGTHS = (3, 17, 126, 131)
"""Prompt lengths of field case 1: two short of a boundary of 128, all residues of 4 among them and their outputs."""

Pattern = Callable[[int, int], tuple[int, int]]
"""(how many verifies the row was scripted before, most drafts) -> (drafts to make, how many of them right)."""


@functools.cache
def model_of(seed: int = 5, dtype: torch.dtype = torch.float32, config=TINY):
    """A random model, made once."""
    return random_model(config, seed=seed, dtype=dtype)


@functools.cache
def prompt_of(length: int, seed: int | None = None) -> tuple[int, ...]:
    """A stream of its own for every length (and seed)."""
    return tuple(random_ids(length, seed=length if seed is None else 10_000 * (seed + 1) + length))


def make_llm(model, tokenizer=None, **options) -> LLM:
    """An LLM over live weights; nothing drafts unless a test says so."""
    defaults = {"max_rows": 8, "max_model_len": 768, "max_chunk": 96, "max_step_tokens": 256, "draft_len": 0}
    return LLM.from_model(model, tokenizer, **{**defaults, **options})


# --- the oracle ---------------------------------------------------------------------------------------------


@functools.cache
def _oracle_llm(model, tokenizer) -> LLM:
    llm = make_llm(model, tokenizer, speculate="none", max_rows=1, max_chunk=704, max_step_tokens=704)
    assert type(llm.engine.proposer).__name__ == "NoProposer"
    return llm


@functools.cache
def oracle(model, prompt: tuple[int, ...], params: SamplingParams, tokenizer=None, edits: tuple = ()) -> Row:
    """The request alone: one row, no speculation, prompt in one piece, then one token per step.

    Args:
        model: the weights.
        prompt: token ids.
        params: draft_len is left out.
        tokenizer: if text matters.
        edits: (field, value) pairs of the Request, such as EOS ids that the model's config does not have.
    """
    if params.draft_len is not None:
        return oracle(model, prompt, replace(params, draft_len=None), tokenizer, edits)
    llm = _oracle_llm(model, tokenizer)
    row = row_of(llm, prompt, params, edits)
    llm.engine.add([row])
    before = llm.engine.num_steps
    while llm.engine.has_work:
        llm.engine.step()
        assert llm.engine.num_steps - before <= llm.engine.config.max_model_len, "the oracle does not end"
    assert llm.engine.num_steps - before == len(row.output_token_ids) + (row.finish_reason is FinishReason.ERROR)
    return row


def row_of(llm: LLM, prompt: Sequence[int], params: SamplingParams, edits: tuple = ()) -> Row:
    """The only row of a request, with its Request's fields edited."""
    (row,) = llm.rows_of(list(prompt), params)
    for name, value in edits:
        assert hasattr(row.request, name)
        setattr(row.request, name, value)
    return row


def answer(row: Row) -> tuple:
    """What must not depend on speculation or neighbours: tokens, log-probabilities to the last bit, reasons, text."""
    text = None if row.text is None else row.text.text
    return (tuple(row.output_token_ids), row.logprobs, row.finish_reason, row.stop_reason, row.error, text)


def begins_like(row: Row, expected: Row) -> bool:
    """Whether tokens and log-probabilities are the first ones of a longer oracle."""
    count = len(row.output_token_ids)
    logprobs = expected.logprobs[:count] if row.request.params.logprobs is not None else []
    return row.output_token_ids == expected.output_token_ids[:count] and row.logprobs == logprobs


# --- scripts ------------------------------------------------------------------------------------------------


def cycle(*counts: int, offset: int = 0) -> Pattern:
    """Draft as much as allowed; the number of right drafts goes round through `counts`."""
    return lambda place, most: (most, min(most, counts[(place + offset) % len(counts)]))


class Script:
    """Drafts the tokens that a row will emit, with a wrong one where it shall stop; remembers what it dictated."""

    def __init__(self, vocab_size: int = TINY.vocab_size) -> None:
        self.vocab_size = vocab_size
        self.answers: dict[tuple, tuple[Sequence[int], Pattern]] = {}
        self.dictated: dict[tuple, list[tuple[int, int]]] = {}
        self.asked: Counter = Counter()

    def add(self, row: Row, tokens: Sequence[int], pattern: Pattern) -> Row:
        """Say what `row` will emit and how far its drafts shall be right."""
        key = (row.request.request_id, row.choice)
        self.answers[key] = (tokens, pattern)
        self.dictated[key] = []
        return row

    def __call__(self, row: Row, most: int) -> list[int]:
        key = (row.request.request_id, row.choice)
        tokens, pattern = self.answers[key]
        num_drafts, num_right = pattern(self.asked[key], most)
        self.asked[key] += 1
        assert 0 <= num_right <= num_drafts <= most
        done = len(row.output_token_ids)
        drafts = list(tokens[done : done + num_drafts])
        assert len(drafts) == num_drafts, "the script does not know what the row will emit"
        if num_right < num_drafts:
            drafts[num_right] = (drafts[num_right] + 1 + len(self.dictated[key]) % 5) % self.vocab_size
        if num_drafts:
            self.dictated[key].append((num_drafts, num_right))
        return drafts

    def of(self, row: Row) -> list[tuple[int, int]]:
        """(drafts, right ones) of each verify with drafts that was dictated to a row."""
        return self.dictated[row.request.request_id, row.choice]

    def install(self, llm: LLM) -> Script:
        """Make this the engine's proposer."""
        llm.engine.proposer = ScriptedProposer(self)
        return self


class MTPUnderScript(MTPProposer):
    """Runs the MTP block as ever, keeps what it proposes, and hands out a script's drafts in its place.

    Attributes:
        proposed: (row key, tokens of the row then) -> the block's own drafts.
        pause: called with the number of the proposal; True drafts nothing, for any row.
    """

    def __init__(self, target, script: Script | None, pause: Callable[[int], bool] = lambda number: False) -> None:
        super().__init__(target)
        self.script, self.pause = script, pause
        self.proposed: dict[tuple, list[int]] = {}
        self.num_proposals = 0
        self.forwards_of_step: list[tuple[int, list[int]]] = []

    def propose(self, rows, streams, draft_lens, are_kept) -> None:
        if self.pause(self.num_proposals):
            draft_lens = [0] * len(rows)
        self.num_proposals += 1
        before = self.num_forwards
        super().propose(rows, streams, draft_lens, are_kept)
        self.forwards_of_step.append((self.num_forwards - before, list(draft_lens)))
        for item, most in zip(rows, draft_lens, strict=True):
            row = item.row
            assert len(row.drafts) <= most
            if most:
                self.proposed[row.request.request_id, row.choice, row.num_tokens] = list(row.drafts)
            if self.script is not None:
                row.drafts = self.script(row, most)[:most] if most else []


@torch.inference_mode()
def write_missing_keys(llm: LLM, row: Row) -> None:
    """Make the keys of the MTP block that a row which does not draft has put off, so that they can be looked at."""
    store = llm.engine.target.store
    no_streams = store.mtp_streams.new_zeros(0, *store.mtp_streams.shape[2:])
    proposer = llm.engine.proposer
    written, token_idx, streams = proposer._missing_pairs([(CaughtUp(row, row.kv_len, 0), 0)], no_streams)
    if written:
        proposer._catch_up(written, [], streams, token_idx)


def reference_drafts(model, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, count: int,
                     seed: int = 0) -> list[int]:  # fmt: skip
    """The MTP block's drafts after prompt and output, from scratch: every pair in one forward, no catching up."""
    harness = Harness(model, replace(ENGINE, max_rows=1))
    tokens = [*prompt, *output]
    streams = harness.streams(Segment(0, 0, tokens[:-1]))[0]
    hidden = harness.mtp(streams, Segment(0, 0, tokens[1:]))[-1:]
    drafts: list[int] = []
    while True:
        position = SamplingPosition(params, prompt, [*output, *drafts], len(tokens) + len(drafts), seed)
        drafts.append(int(sample(model.mtp_logits(hidden).float(), [position]).token_ids[0]))
        if len(drafts) == count:
            return drafts
        hidden = harness.mtp(hidden, Segment(0, len(tokens) - 2 + len(drafts), drafts[-1:]))


# --- what happened ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advance:
    """One row's part in one step.

    Attributes:
        row: the row.
        start: first position fed.
        end: position after the last one fed, drafts included.
        num_drafts: drafts fed.
        num_emitted: output tokens that the row gained.
        kept: positions whose state counts afterwards.
        verifies: whether the row's last token was fed.
    """

    row: Row
    start: int
    end: int
    num_drafts: int
    num_emitted: int
    kept: int
    verifies: bool

    def rewinds_across(self, ratio: int) -> bool:
        """Whether rejected drafts had completed an entry of this ratio."""
        return self.num_emitted <= self.num_drafts and self.end // ratio > self.kept // ratio


def drive(llm: LLM, max_steps: int = 3000, after_step: Callable[[int], None] | None = None) -> list[list[Advance]]:
    """Step until there is no work; checks the invariants of every step and returns what each did."""
    scheduler, steps = llm.engine.scheduler, []
    original, seen = scheduler.plan, []

    def spy():
        planned = original()
        seen[:] = [(item, item.reaches_end, item.row.num_tokens) for item in planned]
        return planned

    scheduler.plan = spy
    try:
        while llm.engine.has_work:
            assert len(steps) < max_steps, f"no end after {max_steps} steps"
            seen.clear()
            llm.engine.step()
            steps.append([_advance(*item) for item in seen])
            assert sum(a.end - a.start for a in steps[-1]) <= llm.engine.config.max_step_tokens
            assert max(a.end for a in steps[-1]) <= llm.engine.config.max_model_len
            scheduler.check()
            if after_step is not None:
                after_step(len(steps))
    finally:
        del scheduler.plan
    assert scheduler.num_free_slots == llm.engine.config.max_rows
    return steps


def _advance(item, verifies: bool, num_tokens: int) -> Advance:
    row, segment = item.row, item.segment
    num_emitted = row.num_tokens - num_tokens
    kept = row.num_tokens - 1 if verifies else segment.end
    if verifies and item.num_drafts and row.kv_len == 0 and not row.is_finished:
        kept = 0  # its logits were not finite: it starts over, without drafts
    if row.is_finished:
        assert not row.drafts and row.slot is None
    else:
        assert row.kv_len == kept, f"kv_len {row.kv_len} after {row.num_tokens} tokens, fed up to {segment.end}"
        assert row.is_decoding or not row.drafts
        assert num_emitted > 0 or not verifies or kept == 0
    assert num_emitted == 0 or verifies
    return Advance(row, segment.start, segment.end, item.num_drafts, num_emitted, kept, verifies)


def of_row(steps: Sequence[Sequence[Advance]], row: Row) -> list[Advance]:
    """A row's verifies, in order."""
    return [a for step in steps for a in step if a.row is row and a.verifies]


def assert_dictated(script: Script, steps: Sequence[Sequence[Advance]], rows: Sequence[Row]) -> None:
    """Every verify accepted exactly what the script said, and the row's statistics agree."""
    for row in rows:
        happened = [(a.num_drafts, a.num_emitted - 1) for a in of_row(steps, row) if a.num_drafts]
        assert happened == script.of(row), "another number of drafts was accepted than the script made right"
        assert (row.stats.num_drafted, row.stats.num_accepted) == tuple(map(sum, zip(*happened, strict=True)))


def assert_ragged(steps: Sequence[Sequence[Advance]], ratios: Sequence[int] = (4, 128), num_residues: int = 3) -> None:
    """The fixture is not degenerate: unequal advances, unequal residues of 4, rewinds across entry boundaries."""
    verifies = [[a for a in step if a.verifies] for step in steps]
    assert any(len({a.num_emitted for a in step}) > 1 for step in verifies), "rows never advance unequally"
    assert any(len({a.start % 4 for a in step}) >= num_residues for step in verifies), "rows share their residues"
    for ratio in ratios:
        assert any(a.rewinds_across(ratio) for step in verifies for a in step), f"no rewind crosses ratio {ratio}"


# --- a target that says what it is told -----------------------------------------------------------------------


class _Passthrough(torch.nn.Module):
    """A layer that hands its streams on."""

    def forward(self, streams, token_ids, attend):
        return streams


class ScriptedTarget(DeepseekV4):
    """Its token after token t is `successors[t]`, always: a whole output can be written down without a model.

    The streams of a position are its token, one-hot, so that a packed token which is mixed up with another one shows.
    """

    native = None

    def __init__(self, successors: Sequence[int]) -> None:
        super().__init__(replace(TINY, vocab_size=len(successors), num_hidden_layers=1, compress_ratios=(0,)))
        self.requires_grad_(False)
        self.layers = torch.nn.ModuleList([_Passthrough()])
        self.successors = torch.tensor(successors)

    def embed_streams(self, token_ids):
        """[T, 1, vocab]."""
        return torch.nn.functional.one_hot(token_ids, len(self.successors)).float().unsqueeze(1)

    def logits(self, streams):
        """10 for the successor, 0 for all others."""
        following = self.successors[streams[:, 0].argmax(-1)]
        return 10.0 * torch.nn.functional.one_hot(following, len(self.successors)).float()

    def output(self, last_token: int, count: int) -> list[int]:
        """The first `count` tokens after `last_token`."""
        tokens = [last_token]
        while len(tokens) <= count:
            tokens.append(int(self.successors[tokens[-1]]))
        return tokens[1:]
