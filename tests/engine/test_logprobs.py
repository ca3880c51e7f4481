"""Log-probabilities are the model's own; ranks count the whole vocabulary; no row depends on its neighbours."""

import pytest
import torch

from polytempo.engine.logprobs import _first_argmax_anywhere, first_argmax, gather_logprobs, log_normaliser, ranked_ids
from polytempo.errors import InvariantError


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 4


def test_values_are_those_of_log_softmax():
    logits = normal(6, 1003)
    chosen = torch.arange(6) * 100
    rows = gather_logprobs(logits, chosen, 5)
    expected = logits.double().log_softmax(-1)
    for row_idx, row in enumerate(rows):
        assert list(row)[0] == int(chosen[row_idx])
        for token_id, entry in row.items():
            assert entry.logprob == pytest.approx(float(expected[row_idx, token_id]), rel=1e-6)
            assert entry.rank == int((expected[row_idx] > expected[row_idx, token_id]).sum()) + 1
            assert entry.decoded_token is None


def test_ties_rank_by_id_and_the_chosen_token_is_not_repeated():
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 0.0]])
    (row,) = gather_logprobs(logits, torch.tensor([3]), 3)
    assert [(token_id, entry.rank) for token_id, entry in row.items()] == [(3, 2), (1, 1), (0, 3)]
    (row,) = gather_logprobs(logits, torch.tensor([2]), 2)
    assert [(token_id, entry.rank) for token_id, entry in row.items()] == [(2, 4), (1, 1), (3, 2)]


def test_zero_gives_the_chosen_token_alone_and_counts_may_differ_by_row():
    logits = normal(3, 20)
    rows = gather_logprobs(logits, torch.tensor([4, 5, 6]), 0)
    assert [list(row) for row in rows] == [[4], [5], [6]]
    worst = logits.argmin(-1)
    rows = gather_logprobs(logits, worst, [0, 20, 3])
    assert [len(row) for row in rows] == [1, 20, 4]
    assert [row[int(token_id)].rank for row, token_id in zip(rows, worst, strict=True)] == [20, 20, 20]


def test_banned_tokens_have_minus_infinity_and_text_is_decoded():
    logits = torch.tensor([[0.0, -float("inf")]])
    (row,) = gather_logprobs(logits, torch.tensor([1]), 1, decode=lambda token_id: f"<{token_id}>")
    assert row[1].logprob == -float("inf") and row[1].rank == 2 and row[1].decoded_token == "<1>"
    assert row[0].logprob == 0.0 and row[0].decoded_token == "<0>"


def test_rows_are_bit_independent_of_the_others():
    logits = normal(40, 1003)
    chosen = torch.arange(40) * 25
    alone = [gather_logprobs(logits[[i]], chosen[[i]], i % 4)[0] for i in range(40)]
    norms = [log_normaliser(logits[[i]])[0] for i in range(40)]
    for num_rows in range(1, 41):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(num_rows))[:num_rows].tolist()
        rows = gather_logprobs(logits[order], chosen[order], [i % 4 for i in order])
        assert rows == [alone[i] for i in order]
        assert torch.equal(log_normaliser(logits[order]), torch.stack([norms[i] for i in order]))


def test_ranking_orders_every_float_and_ties_by_id():
    edge = [0.0, -0.0, 1e-45, -1e-45, float("inf"), -float("inf"), 3e38, -3e38, 1.0, 1.0, -1.0, -1.0]
    coarse = (normal(5, 600) * 2).round() / 2
    for row in (torch.tensor([edge]), coarse):
        _, expected = torch.sort(row, dim=-1, descending=True, stable=True)
        for count in (0, 1, 5, row.shape[-1] - 1, row.shape[-1]):
            assert torch.equal(ranked_ids(row, count), expected[:, :count])
        tied = row.clamp(max=0.5)  # several highest in every row, else ties would decide nothing
        assert ((tied == 0.5).sum(-1) > 1).all()
        for argmax in (first_argmax, _first_argmax_anywhere):
            assert torch.equal(argmax(row), expected[:, 0])
            assert torch.equal(argmax(row.double()), expected[:, 0])
            assert torch.equal(argmax(tied), (tied == 0.5).long().cumsum(-1).eq(0).sum(-1)), "not the first of equals"


def test_sizes_that_disagree_are_named():
    logits = normal(2, 5)
    for chosen, wanted in ((torch.tensor([1]), 1), (torch.tensor([1, 2]), 6), (torch.tensor([1, 2]), [1])):
        with pytest.raises(InvariantError, match=r"logits \(2, 5\)"):
            gather_logprobs(logits, chosen, wanted)
    assert gather_logprobs(logits[:0], torch.zeros(0, dtype=torch.int64), 2) == []
