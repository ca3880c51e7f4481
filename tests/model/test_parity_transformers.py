"""Logits equal transformers' DeepseekV4ForCausalLM on the same weights, at every position."""

import pytest
import torch
from support import (
    ENGINE,
    TINY,
    Harness,
    entries_by_slot,
    ids_with_clear_choices,
    random_ids,
    random_model,
    relative_difference,
    transformers_model,
    with_ratios,
)

LENGTHS = (*range(1, 10), *range(126, 133), *range(254, 259), 600)
CONFIGS = {
    "all_kinds": TINY,
    "window_only": with_ratios(0, 0, num_hash_layers=0),
    "indexer_keeps_all": with_ratios(4, 0, index_topk=512),
    "hca_first": with_ratios(128, 4, num_hash_layers=2),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request):
    model = random_model(CONFIGS[request.param], seed=3)
    return model, transformers_model(model)


@pytest.mark.parametrize("length", LENGTHS)
def test_one_shot_logits_equal(pair, length):
    model, reference = pair
    ids = ids_with_clear_choices(model, length)
    with torch.no_grad():
        theirs = reference(torch.tensor([ids]), use_cache=False).logits[0]
    assert theirs.std() > 0.5, "the fixture's logits are degenerate"
    assert relative_difference(Harness(model).prefill(ids, [length]), theirs) <= 1e-4


@pytest.mark.parametrize("length", (9, 132, 258))
def test_token_by_token_logits_equal(pair, length):
    model, reference = pair
    ids = ids_with_clear_choices(model, length)
    with torch.no_grad():
        theirs = reference(torch.tensor([ids]), use_cache=False).logits[0]
    assert relative_difference(Harness(model).prefill(ids, [1]), theirs) <= 1e-4


def test_every_kind_of_state_matters():
    """Sensitivity: a far token, one entry and one index key each move the last logits beyond the tolerance."""
    model, ids = random_model(seed=3), random_ids(300, seed=0)
    base = Harness(model).prefill(ids, [300])[-1]
    changed = [(ids[0] + 1) % TINY.vocab_size, *ids[1:]]
    assert relative_difference(Harness(model).prefill(changed, [300])[-1], base) > 1e-2

    def after_change(change) -> torch.Tensor:
        harness = Harness(model, ENGINE)
        harness.prefill(ids[:-1], [299])
        change(harness.store)
        return harness.prefill(ids[-1:], [1], start=299)[-1]

    def negate_hca(store):
        entries_by_slot(store, store.layers[2].compressed, 128, writable=True)[0, 0].neg_()

    def shuffle_index(store):
        keys = entries_by_slot(store, store.layers[1].index, 4, writable=True)
        keys[0, :74] = keys[0, :74].flip(0)

    def negate_window(store):
        window = store.layers[0].window
        window[0, 298 % window.shape[1]].neg_()

    for change in (negate_hca, shuffle_index, negate_window):
        assert relative_difference(after_change(change), base) > 1e-3, change.__name__
