"""Many draws follow the target's law under every option; the law is written once more here, in numpy."""

import numpy as np
import pytest
import scipy.stats
import torch

from polytempo.engine.bad_words import BadWords
from polytempo.engine.sampling import sample
from polytempo.engine.sampling_position import SamplingPosition
from polytempo.types import SamplingParams

NUM_DRAWS = 50_000
LOGITS = np.array([1.1, 0.3, -0.4, 2.0, 0.9, 0.9, -1.5, 1.6, 0.0, -3.0, 0.5, 1.2, -0.8])
PROMPT, OUTPUT = [3, 7, 7, 2], [0, 7, 4, 7, 7, 9]


def law(params, stop_token_ids=(), bad_words=()):
    """Probability of each token, straight from the definitions of the options."""
    logits = LOGITS.astype(np.float64).copy()
    if params.allowed_token_ids is not None:
        logits[[t for t in range(len(logits)) if t not in params.allowed_token_ids]] = -np.inf
    history = PROMPT + OUTPUT
    for word in bad_words:
        if history[len(history) - len(word) + 1 :] == list(word[:-1]):
            logits[word[-1]] = -np.inf
    if len(OUTPUT) < params.min_tokens:
        logits[list(stop_token_ids)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in set(history):
        positive = logits[token] > 0
        logits[token] *= 1 / params.repetition_penalty if positive else params.repetition_penalty
    for token in set(OUTPUT):
        logits[token] -= params.presence_penalty + params.frequency_penalty * OUTPUT.count(token)
    probs = np.exp(logits / params.temperature)
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0
    order = sorted(range(len(probs)), key=lambda t: (-probs[t], t))
    if params.top_k > 0:
        probs[order[params.top_k :]] = 0
    probs /= probs.sum()
    total, kept = 0.0, []
    for token in order:
        if total < params.top_p:
            kept.append(token)
        total += probs[token]
    probs[[t for t in order if t not in kept]] = 0
    return probs / probs.sum()


def counts_of(params, axis="position", **rules):
    """How often each token is drawn over NUM_DRAWS addresses along one axis of the noise."""
    fixed = {"position": 100, "seed": 42, "choice": 1, **rules}
    fixed["bad_words"] = BadWords.of(rules.get("bad_words", ()))
    del fixed[axis]
    positions = [SamplingPosition(params, PROMPT, OUTPUT, **{axis: i}, **fixed) for i in range(NUM_DRAWS)]
    logits = torch.tensor(LOGITS, dtype=torch.float32).expand(NUM_DRAWS, -1)
    drawn = sample(logits, positions)
    assert drawn.failures() == {}
    return np.bincount(drawn.token_ids.numpy(), minlength=len(LOGITS))


def p_value(counts, probs):
    assert counts[probs == 0].sum() == 0, "a token outside the law was drawn"
    possible = probs > 0
    expected = probs[possible] * counts.sum()
    return scipy.stats.chisquare(counts[possible], expected).pvalue if possible.sum() > 1 else 1.0


CASES = {
    "plain": ({}, {}),
    "cold": ({"temperature": 0.6}, {}),
    "top_k": ({"top_k": 3}, {}),
    "top_k cuts a tie": ({"top_k": 6}, {}),
    "top_p": ({"top_p": 0.7}, {}),
    "min_p with temperature": ({"min_p": 0.3, "temperature": 2.0}, {}),
    "all filters": ({"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.15}, {}),
    "top_p of what top_k left": ({"top_k": 4, "top_p": 0.6}, {}),
    "frequency": ({"frequency_penalty": 0.5}, {}),
    "penalties, filters": (
        {"repetition_penalty": 1.3, "presence_penalty": -0.5, "frequency_penalty": 0.2, "top_p": 0.85},
        {},
    ),
    "bias": ({"logit_bias": {6: 2.5, 3: -1.0}, "repetition_penalty": 1.5}, {}),
    "allowed": ({"allowed_token_ids": [1, 3, 6, 9]}, {}),
    "bad words": ({}, {"bad_words": ((7, 9, 3), (7, 3), (11,))}),
    "min_tokens": ({"min_tokens": 7}, {"stop_token_ids": frozenset({3, 7})}),
    "min_tokens reached": ({"min_tokens": 6}, {"stop_token_ids": frozenset({3, 7})}),
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_law(name):
    options, rules = CASES[name]
    params = SamplingParams(**options)
    assert p_value(counts_of(params, **rules), law(params, **rules)) > 1e-3


@pytest.mark.parametrize("axis", ["seed", "choice"])
def test_the_law_holds_along_every_axis_of_the_noise(axis):
    params = SamplingParams(temperature=0.9, top_p=0.95)
    assert p_value(counts_of(params, axis), law(params)) > 1e-3


def test_the_chi_square_test_sees_a_small_error():
    counts = counts_of(SamplingParams(temperature=1.0))
    assert p_value(counts, law(SamplingParams(temperature=1.05))) < 1e-6
    assert p_value(counts, law(SamplingParams(presence_penalty=0.05))) < 1e-6


@pytest.mark.parametrize("axis", ["position", "seed", "choice"])
def test_successive_draws_are_independent(axis):
    params = SamplingParams(top_k=4)
    fixed = {"position": 5, "seed": 6, "choice": 0}
    del fixed[axis]
    positions = [SamplingPosition(params, [], [], **{axis: i}, **fixed) for i in range(NUM_DRAWS)]
    logits = torch.tensor(LOGITS, dtype=torch.float32).expand(len(positions), -1)
    tokens = sample(logits, positions).token_ids.numpy()
    _, codes = np.unique(tokens, return_inverse=True)
    table = np.zeros((4, 4))
    np.add.at(table, (codes[:-1], codes[1:]), 1)
    assert scipy.stats.chi2_contingency(table).pvalue > 1e-3
