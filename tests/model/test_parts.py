"""Parts whose faults the logits of a whole model hide: mixing weights, clamps, routing, and ties among entries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import TINY, Harness, random_ids, random_model

from polytempo.cache.layout import Segment
from polytempo.model.compressor import choose_entries
from polytempo.model.hyper import collapse, expand
from polytempo.model.moe import Experts, Gate


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def normalised(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + TINY.rms_norm_eps)


@pytest.fixture(scope="module")
def model():
    return random_model(seed=3)


@pytest.fixture(scope="module")
def streams(model) -> torch.Tensor:
    return Harness(model).streams(Segment(0, 0, random_ids(50, seed=0)))[0]


def test_hc_head_has_no_factor_2(model, streams):
    """The norm that follows it makes logits blind to its scale; the streams' shares are not."""
    for head in (model.hc_head, model.mtp[0].hc_head):
        fn, base, scale = (part.double().numpy() for part in (head.fn, head.base, head.scale))
        x = streams.double().numpy()
        shares = sigmoid(normalised(x.reshape(50, -1)) @ fn.T * scale + base) + TINY.hc_eps
        expected = np.einsum("th,thd->td", shares, x)
        assert np.ptp(shares) > 0.3
        np.testing.assert_allclose(head(streams).numpy(), expected, atol=1e-5 * np.ptp(expected))


def test_mixing_weights_of_a_site(model, streams):
    """σ + eps, 2σ, and row softmax + eps, one column normalisation, then (iterations − 1) × (rows, columns)."""
    site, hc, eps = model.layers[1].hc_attn, TINY.hc_mult, TINY.hc_eps
    fn, base, scale = (part.double().numpy() for part in (site.fn, site.base, site.scale))
    mix = normalised(streams.double().numpy().reshape(50, -1)) @ fn.T
    weights = site(streams)
    np.testing.assert_allclose(weights.pre.T, sigmoid(mix[:, :hc] * scale[0] + base[:hc]) + eps, atol=1e-5)
    post = 2 * sigmoid(mix[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    assert post.max() > 1.2
    np.testing.assert_allclose(weights.post.T, post, atol=1e-5)
    comb = np.exp((mix[:, 2 * hc :] * scale[2] + base[2 * hc :]).reshape(50, hc, hc))
    comb = comb / comb.sum(2, keepdims=True) + eps
    comb = comb / (comb.sum(1, keepdims=True) + eps)
    for _ in range(TINY.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(2, keepdims=True) + eps)
        comb = comb / (comb.sum(1, keepdims=True) + eps)
    assert np.abs(comb - comb.transpose(0, 2, 1)).max() > 0.1, "a symmetric matrix hides a transposition"
    assert np.abs(comb.sum(2) - 1).max() > 1e-4, "one more iteration must show"
    np.testing.assert_allclose(weights.comb.permute(2, 0, 1), comb, atol=1e-5)


def test_reading_and_writing_streams(model, streams):
    """Σ pre·stream, and new[k] = post[k]·y + Σ_j comb[j, k]·old[j]."""
    weights, output = model.layers[1].hc_attn(streams), torch.randn(50, TINY.hidden_size)
    np.testing.assert_allclose(
        collapse(streams, weights.pre), torch.einsum("ht,thd->td", weights.pre, streams), atol=1e-5
    )
    expected = torch.einsum("kt,td->tkd", weights.post, output)
    expected = expected + torch.einsum("jkt,tjd->tkd", weights.comb, streams)
    np.testing.assert_allclose(expand(streams, output, weights), expected, atol=1e-5)


def direct_expert(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
    limit = TINY.swiglu_limit
    gate, up = (x @ w1.T).clamp(max=limit), (x @ w3.T).clamp(-limit, limit)
    assert (x @ w1.T).max() > limit and (x @ w1.T).min() < -limit, "the clamps must bind"
    assert (x @ w3.T).max() > limit and (x @ w3.T).min() < -limit
    return (torch.nn.functional.silu(gate) * up) @ w2.T


def test_clamps_of_routed_and_shared_experts(model):
    """Gate clamped above only, up on both sides, the shared expert too."""
    ffn = model.layers[2].ffn
    x = 12 * torch.randn(20, TINY.hidden_size, generator=torch.Generator().manual_seed(0))
    shared = ffn.shared_experts
    expected = direct_expert(x, shared.w1.weight, shared.w2.weight, shared.w3.weight)
    np.testing.assert_allclose(shared(x), expected, atol=1e-5 * float(expected.abs().max()))
    expert_ids = torch.tensor([[5, 2]] * 20)
    shares = torch.rand(20, 2, generator=torch.Generator().manual_seed(1))
    expected = 0
    for choice, expert in enumerate((5, 2)):
        w1, w3 = ffn.experts.w13[expert].chunk(2)
        expected = expected + shares[:, choice : choice + 1] * direct_expert(x, w1, ffn.experts.w2[expert], w3)
    np.testing.assert_allclose(ffn.experts(x, expert_ids, shares), expected, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_no_tokens(dtype):
    experts = Experts(TINY, dtype, "cpu")
    x, expert_ids = torch.empty(0, TINY.hidden_size, dtype=dtype), torch.empty(0, 3, dtype=torch.int64)
    by_choice = experts._outputs(x, expert_ids)
    assert by_choice.shape == (0, 3, TINY.hidden_size) and by_choice.dtype == dtype
    assert experts(x, expert_ids, torch.empty(0, 3)).shape == (0, TINY.hidden_size)


def direct_scores(gate: Gate, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.softplus(x.double() @ gate.weight.double().T).sqrt()


def test_score_routing_uses_the_bias_for_the_choice_only(model):
    gate, top_k = model.layers[2].ffn.gate, TINY.num_experts_per_tok
    x = torch.randn(200, TINY.hidden_size, generator=torch.Generator().manual_seed(0))
    expert_ids, weights = gate(x, torch.zeros(200, dtype=torch.int64))
    scores = direct_scores(gate, x)
    chosen = (scores + gate.bias).topk(top_k).indices
    assert (chosen.sort(-1).values != scores.topk(top_k).indices.sort(-1).values).any(-1).sum() > 20
    assert torch.equal(expert_ids, chosen)
    expected = scores.gather(-1, chosen)
    expected = expected / expected.sum(-1, keepdim=True) * TINY.routed_scaling_factor
    np.testing.assert_allclose(weights, expected, atol=1e-5)


def test_hash_routing_takes_experts_by_token_id_and_weights_from_the_gate(model):
    gate = model.layers[0].ffn.gate
    token_ids = torch.tensor(random_ids(200, seed=0))
    x = torch.randn(200, TINY.hidden_size, generator=torch.Generator().manual_seed(0))
    expert_ids, weights = gate(x, token_ids)
    assert (expert_ids != direct_scores(gate, x).topk(2).indices).any(-1).sum() > 100
    assert torch.equal(expert_ids, gate.tid2eid[token_ids])
    expected = direct_scores(gate, x).gather(-1, expert_ids)
    expected = expected / expected.sum(-1, keepdim=True) * TINY.routed_scaling_factor
    np.testing.assert_allclose(weights, expected, atol=1e-5)


def direct_choice(scores: list[float], num_visible: int, top_k: int) -> list[int]:
    """The best top_k visible entries, the lowest first among equals, ascending."""
    ranked = sorted(range(num_visible), key=lambda entry: (-scores[entry], entry))
    return sorted(ranked[:top_k])


@pytest.mark.parametrize("num_columns", (64, 128, 192))
def test_choice_of_entries_among_ties(num_columns):
    """Ties go to the lowest entry, whatever the number of columns; each query counts its own visible entries."""
    generator = torch.Generator().manual_seed(0)
    num_visible = torch.tensor([0, 1, 7, 8, 9, 20, 63, 64] * 4)
    scores = torch.randint(0, 4, (32, 64), generator=generator).float() - 1
    wide = torch.full((32, num_columns), 9.0)
    wide[:, :64] = scores
    kept = choose_entries(wide, num_visible, 8)
    assert kept.shape == (32, 8)
    for row, row_scores, count in zip(kept.tolist(), scores.tolist(), num_visible.tolist(), strict=True):
        chosen = direct_choice(row_scores, count, 8)
        assert len(set(row_scores[:count])) < max(count, 1) or count < 2, "no ties"
        assert row == chosen + [num_columns] * (8 - len(chosen))


def test_fewer_columns_than_top_k():
    assert choose_entries(torch.zeros(1, 4), torch.tensor([3]), 8).tolist() == [[0, 1, 2, 4]]


def test_entry_0_ignores_what_stands_before_it(model):
    """0 · NaN is NaN: a ring that another row left non-finite must not reach the first entry."""
    compressor = model.layers[1].attn.compressor
    generator = torch.Generator().manual_seed(0)
    kv, gate = (torch.randn(2, 8, 2 * TINY.head_dim, generator=generator) for _ in range(2))
    entry_ids = torch.tensor([0, 1])
    clean = compressor.pool(kv, gate, entry_ids)
    for value in (1e30, float("inf"), float("nan")):
        dirty_kv, dirty_gate = kv.clone(), gate.clone()
        dirty_kv[0, :4], dirty_gate[0, :4] = value, value
        assert torch.equal(compressor.pool(dirty_kv, dirty_gate, entry_ids), clean), value
    kv[:, :4] += 1
    moved = compressor.pool(kv, gate, entry_ids)
    assert torch.equal(moved[0], clean[0]) and not torch.equal(moved[1], clean[1])
