"""The sampler's promises: every option acts, ties go to the lowest id, no row depends on its neighbours."""

import random

import pytest
import torch

from polytempo.engine import sampling
from polytempo.engine.bad_words import BadWords
from polytempo.engine.sampling import NO_TOKEN, process_logits, sample
from polytempo.engine.sampling_position import SamplingPosition
from polytempo.errors import InvariantError
from polytempo.types import SamplingParams

VOCAB = 1003  # odd, so that rows begin at every alignment


def place(params=None, *, prompt=(), output=(), position=0, seed=1, choice=0, stops=(), bad=(), drafts=(), **options):
    return SamplingPosition(
        params or SamplingParams(**options),
        list(prompt),
        list(output),
        position,
        seed,
        choice,
        frozenset(stops),
        BadWords.of(bad),
        drafts=list(drafts),
    )


def greedy(logits, **options):
    """The token that one greedy position takes from a list of logits."""
    result = sample(torch.tensor([logits]), [place(temperature=0, **options)])
    assert result.failures() == {}
    return int(result.token_ids)


def reachable(logits, count=400, **options):
    """Every token that `count` positions of a sampled request draw."""
    params = SamplingParams(**options)
    positions = [place(params, position=i) for i in range(count)]
    return set(sample(torch.tensor([logits]).expand(count, -1), positions).token_ids.tolist())


# --- greedy and ties ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_ties_go_to_the_lowest_id_alone_and_beside_a_sampled_row(dtype):
    """A greedy row was once imitated by a tiny temperature, and its ties then fell to the noise."""
    generator = torch.Generator().manual_seed(0)
    for trial in range(200):
        row = torch.randn(VOCAB, generator=generator).to(dtype)
        low, high = sorted(random.Random(trial).sample(range(VOCAB), 2))
        row[[low, high]] = 9.0
        alone = sample(row.unsqueeze(0), [place(temperature=0)])
        neighbour = torch.randn(VOCAB, generator=generator).to(dtype)
        beside = sample(torch.stack([neighbour, row]), [place(seed=trial), place(temperature=0)])
        edited = sample(row.unsqueeze(0), [place(temperature=0, logit_bias={low: 1, high: 1}, top_k=5)])
        assert alone.token_ids.tolist() == [low]
        assert beside.token_ids[1] == low
        assert edited.token_ids.tolist() == [low]


def test_a_row_with_only_top_k_samples_among_k():
    assert reachable([0.0, 1.0, 1.5, 2.0, -1.0], top_k=3) == {1, 2, 3}
    assert reachable([0.0, 1.0, 1.5, 2.0, 1.0], top_k=99) == {0, 1, 2, 3, 4}, "above the vocabulary: all of it"


def test_top_k_cuts_ties_at_exactly_k_lowest_ids_first():
    assert reachable([1.0, 2.0, 1.0, 1.0, 1.0], top_k=3) == {0, 1, 2}


def test_negative_zero_ties_with_zero():
    assert greedy([-1.0, -0.0, 0.0]) == 1
    assert reachable([-0.0, 0.0, -1.0], top_k=1) == {0}


def test_plain_greedy_rows_are_never_processed(monkeypatch):
    monkeypatch.setattr(sampling, "process_logits", None)
    assert sample(torch.tensor([[0.0, 2.0, 1.0]]), [place(temperature=0, top_p=0.5)]).token_ids.tolist() == [1]


# --- every option acts --------------------------------------------------------------------------------------

RISING = [0.0, 1.0, 2.0, 3.0]


def test_temperature_sharpens_and_flattens():
    assert reachable(RISING, temperature=0.05) == {3}
    assert reachable(RISING, temperature=100.0) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-9])
def test_a_tiny_temperature_neither_overflows_nor_picks_another_token(temperature):
    assert reachable([1.0, 2.9e38, 3e38, -3e38], count=50, temperature=temperature) == {2}


def test_a_huge_temperature_is_uniform_over_what_is_not_banned():
    assert reachable(RISING, temperature=1e300, allowed_token_ids=[0, 2, 3]) == {0, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert reachable(logits, top_p=0.5 - 1e-6) == {0}
    assert reachable(logits, top_p=0.5 + 1e-6) == {0, 1}
    assert reachable(logits, top_p=0.79) == {0, 1}
    assert reachable(logits, top_p=0.81) == {0, 1, 2}
    assert reachable(logits, top_p=1e-9) == {0}


def test_top_p_counts_among_what_the_filters_before_it_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert reachable(logits, top_p=0.55) == {0, 1}
    assert reachable(logits, top_p=0.55, top_k=2) == {0}, "0.4 is 0.57 of what two tokens hold"
    assert reachable(logits, top_p=0.55, min_p=0.6) == {0}
    wider = [place(top_k=4, position=i) for i in range(400)]
    narrow = [place(top_p=0.55, top_k=2, position=i) for i in range(400)]
    together = sample(torch.tensor([logits]).expand(800, -1), narrow + wider).token_ids
    assert set(together[:400].tolist()) == {0}, "and of those alone, whatever a neighbour keeps"


@pytest.mark.parametrize("extra", [{}, {"top_k": 4}, {"top_p": 0.999999}])
def test_min_p_is_relative_to_the_best(extra):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert reachable(logits, min_p=0.29, **extra) == {0, 1, 2}
    assert reachable(logits, min_p=0.31, **extra) == {0, 1}
    assert reachable(logits, min_p=1.0, **extra) == {0}


def test_allowed_token_ids():
    assert greedy(RISING, allowed_token_ids=[0, 2]) == 2


def test_logit_bias():
    assert greedy(RISING, logit_bias={1: 2.5}) == 1
    assert greedy(RISING, logit_bias={3: -100}) == 2


def test_repetition_penalty_covers_prompt_and_output_and_both_signs():
    assert greedy(RISING, repetition_penalty=2.0, prompt=[3]) == 2
    assert greedy(RISING, repetition_penalty=2.0, output=[3]) == 2
    assert greedy([-2.0, -1.5], repetition_penalty=2.0, prompt=[1]) == 0
    assert greedy(RISING, repetition_penalty=2.0, prompt=[3, 3], output=[3, 3]) == 2, "3/2 once, not 3/16"
    assert greedy([1.4, 0.0, 0.0, 3.0], repetition_penalty=2.0, prompt=[3, 3], output=[3, 3]) == 3


def test_presence_penalty_counts_once_and_ignores_the_prompt():
    assert greedy(RISING, presence_penalty=1.5, prompt=[3]) == 3
    assert greedy(RISING, presence_penalty=1.5, output=[3]) == 2
    assert greedy([0, 0, 1.4, 3.0], presence_penalty=1.5, output=[3, 3, 3]) == 3


def test_frequency_penalty_counts_every_time_and_ignores_the_prompt():
    assert greedy(RISING, frequency_penalty=0.4, prompt=[3, 3, 3]) == 3
    assert greedy(RISING, frequency_penalty=0.4, output=[3, 3]) == 3
    assert greedy(RISING, frequency_penalty=0.4, output=[3, 3, 3]) == 2


def test_bias_comes_before_penalties():
    assert greedy([0.0, 1.5], logit_bias={0: 2.0}, repetition_penalty=2.0, prompt=[0]) == 1


def test_min_tokens_bans_stops_exactly_until_the_output_has_that_many():
    for length in range(6):
        expected = 2 if length < 4 else 3
        assert greedy(RISING, min_tokens=4, stops=[3], output=[0] * length) == expected


def test_bad_words():
    assert greedy(RISING, bad=[[3]]) == 2
    assert greedy(RISING, bad=[[1, 0, 3]], output=[1, 0]) == 2
    assert greedy(RISING, bad=[[1, 0, 3]], output=[1, 1]) == 3
    assert greedy(RISING, bad=[[1, 0, 3]], prompt=[2, 1], output=[0]) == 2, "a word may begin in the prompt"
    assert greedy(RISING, bad=[[1, 0, 3]], prompt=[0]) == 3, "a history shorter than the word"
    assert greedy(RISING, bad=[[1, 3], [2]], output=[1]) == 1


# --- failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize(
    "bad_row", [[float("nan"), 1, 2, 3], [0, 1, 2, float("inf")], [-float("inf")] * 4, [float("nan")] * 4]
)
def test_rows_that_are_not_finite_get_no_token_and_harm_no_neighbour(options, bad_row):
    good = [0.0, -float("inf"), 5.0, 1.0]
    positions = [place(**options), place(**options), place(temperature=0)]
    result = sample(torch.tensor([bad_row, good, good]), positions)
    expected = sample(torch.tensor([good, good]), positions[1:])
    assert result.token_ids[0] == NO_TOKEN
    assert torch.equal(result.token_ids[1:], expected.token_ids)
    assert result.is_finite.tolist() == [False, True, True]
    assert list(result.failures()) == [0] and "not finite" in result.failures()[0]
    alone = sample(torch.tensor([bad_row]), positions[:1])
    assert alone.token_ids.tolist() == [NO_TOKEN]


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}])
def test_constraints_that_leave_nothing_are_named(options):
    position = place(allowed_token_ids=[2], bad=[[2]], **options)
    result = sample(torch.tensor([RISING]), [position])
    assert result.token_ids.tolist() == [NO_TOKEN]
    assert result.is_finite.tolist() == [True] and result.has_candidates.tolist() == [False]
    assert "leave no token" in result.failures()[0]


def test_an_overflowing_penalty_is_a_failure_not_a_token():
    result = sample(torch.tensor([[3e38, 1.0]]), [place(repetition_penalty=1e-3, prompt=[0])])
    assert result.token_ids.tolist() == [NO_TOKEN] and result.is_finite.tolist() == [False]


def test_sizes_that_disagree_and_ids_outside_the_vocabulary_are_named():
    with pytest.raises(InvariantError, match=r"\(2, 4\) for 1 positions"):
        sample(torch.zeros(2, 4), [place()])
    with pytest.raises(InvariantError, match="token ids 4..4 beside logits of 4"):
        sample(torch.zeros(2, 4), [place(presence_penalty=1, output=[4])] * 2)
    assert sample(torch.zeros(0, 4), []).token_ids.shape == (0,)


def test_logits_are_not_modified():
    logits = torch.tensor([RISING, RISING])
    before = logits.clone()
    sample(logits, [place(bad=[[3]], logit_bias={0: 1}), place(top_p=0.5)])
    assert torch.equal(logits, before)


# --- independence of neighbours, seeds and choices ----------------------------------------------------------


def mixed_positions(count):
    """Positions with every kind of option, each with its own history, seed, choice and place."""
    kinds = [
        {"temperature": 0},
        {"temperature": 0.7},
        {"temperature": 0, "logit_bias": {5: 3.0}},
        {"top_k": 7},
        {"top_k": 50, "top_p": 0.8},
        {"top_p": 0.9},
        {"min_p": 0.05, "temperature": 1.5},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1, "top_p": 0.6},
        {"allowed_token_ids": list(range(0, VOCAB, 3)), "temperature": 2.0},
        {"min_tokens": 50, "top_k": 400, "min_p": 0.01},
    ]
    rng = random.Random(0)
    return [
        place(
            SamplingParams(**{**kinds[i % len(kinds)], "max_tokens": None}),
            prompt=rng.choices(range(VOCAB), k=rng.randrange(30)),
            output=rng.choices(range(VOCAB), k=rng.randrange(40)),
            position=rng.randrange(1000),
            seed=rng.randrange(-(2**63), 2**63),
            choice=i % 4,
            stops=[1, 2],
            bad=[[i]],
        )
        for i in range(count)
    ]


def test_a_row_is_bit_independent_of_the_others():
    positions = mixed_positions(40)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, VOCAB, generator=generator) * 3
    alone_tokens = [sample(logits[[i]], positions[i : i + 1]).token_ids[0] for i in range(40)]
    alone_processed = [process_logits(logits[[i]], positions[i : i + 1])[0] for i in range(40)]
    alone_scaled = [sampling._scale(logits[[i]], positions[i : i + 1])[0] for i in range(40)]
    assert len({int(token) for token in alone_tokens}) > 20
    for num_rows in range(1, 41):
        order = torch.randperm(40, generator=generator)[:num_rows].tolist()
        chosen = [positions[i] for i in order]
        tokens = sample(logits[order], chosen).token_ids
        processed = process_logits(logits[order], chosen)
        scaled = sampling._scale(logits[order], chosen)
        for row_idx, i in enumerate(order):
            assert tokens[row_idx] == alone_tokens[i]
            assert torch.equal(processed[row_idx], alone_processed[i])
            assert torch.equal(scaled[row_idx], alone_scaled[i])
            assert torch.equal(scaled[row_idx].exp(), alone_scaled[i].exp())


def test_filters_are_bit_independent_of_the_others():
    """Bit-equal sums, not only equal tokens: a token rarely shows that a threshold moved by one ulp."""
    generator = torch.Generator().manual_seed(4)
    scaled = (torch.randn(40, VOCAB, generator=generator) * 2).sort(dim=-1, descending=True).values
    scaled = scaled - scaled[:, :1]
    sums = [row.exp().unsqueeze(0).cumsum(-1, dtype=torch.float64)[0] for row in scaled]
    # Each threshold is an exact cumulative sum over the total: the outcome hangs on the last bit.
    params = [SamplingParams(top_p=float(sums[i][20 + i] / sums[i][-1])) for i in range(40)]
    positions = [place(p) for p in params]
    alone = [sampling._filter(scaled[[i]], positions[i : i + 1])[0] for i in range(40)]
    for num_rows in range(1, 41):
        order = torch.randperm(40, generator=generator)[:num_rows].tolist()
        together = sampling._filter(scaled[order], [positions[i] for i in order])
        for row_idx, i in enumerate(order):
            assert torch.equal(together[row_idx], alone[i])


def test_a_seeded_request_repeats_itself_in_any_company():
    """A request with a seed once changed with its neighbours, because the generator was the batch's."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(30, 200, generator=generator)
    mine = [place(temperature=0.8, seed=42, position=i) for i in range(30)]
    alone = torch.cat([sample(logits[[i]], [mine[i]]).token_ids for i in range(30)])
    others = [place(seed=1000 + i, position=i, top_p=0.9) for i in range(30)]
    mixed = [p for pair in zip(others, mine, strict=True) for p in pair]
    together = sample(logits.repeat_interleave(2, 0), mixed).token_ids
    assert torch.equal(together[1::2], alone)
    assert not torch.equal(together[::2], alone)


@pytest.mark.parametrize("field", ["seed", "choice", "position"])
def test_each_part_of_the_noise_address_changes_the_draws(field):
    flat = torch.zeros(64, 50)
    first = sample(flat, [place(**{"position": i, field: 100 + i}) for i in range(64)]).token_ids
    second = sample(flat, [place(**{"position": i, field: 200 + i}) for i in range(64)]).token_ids
    assert not torch.equal(first, second)
    assert len(first.unique()) > 20


def test_later_verify_positions_see_the_drafts_before_them():
    """Bad words and penalties were once computed for the first verified position only."""
    drafts = [1, 0]

    def tokens(**options) -> list[int]:
        positions = [place(temperature=0, output=[2], drafts=drafts[:j], position=j, **options) for j in range(3)]
        return sample(torch.tensor([RISING] * 3), positions).token_ids.tolist()

    assert tokens() == [3, 3, 3]
    assert tokens(bad=[[1, 0, 3]]) == [3, 3, 2] and tokens(bad=[[2, 3]]) == [2, 3, 3]
    assert tokens(min_tokens=2, stops=[3]) == [2, 3, 3] and tokens(min_tokens=3, stops=[3]) == [2, 2, 3]
    # A reward for what occurred: of equals the lowest.
    assert tokens(presence_penalty=-2.0, logit_bias={0: 1.9, 2: -50}) == [3, 1, 0]
