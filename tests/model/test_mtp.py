"""The MTP block: cached drafts equal a straight-line reference, three deep, whatever the layer kinds before it."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from support import (
    TINY,
    Harness,
    ids_with_clear_choices,
    random_ids,
    random_model,
    relative_difference,
    slot_tensors,
    with_ratios,
)
from torch import Tensor

from polytempo.cache.layout import Segment
from polytempo.model.forward import mtp_write
from polytempo.model.full_sequence import full_forward, full_mtp_chain

CONFIGS = {"layer_1_compressed": TINY, "layer_1_uncompressed": with_ratios(0, 0, 4, 128)}
POSITIONS = (5, 100, 260)
"""The last one is beyond the original context (64) of YaRN by a factor of 4."""
assert TINY.compress_rope.original_max_position_embeddings == 64
LENGTH = 280
TOLERANCE = 1e-4


@functools.cache
def target(name: str) -> tuple:
    """Model, token ids [LENGTH] and the target's streams [LENGTH, hc, D] of them."""
    model = random_model(CONFIGS[name], seed=3)
    ids = random_ids(LENGTH, seed=0)
    return model, ids, Harness(model).streams(Segment(0, 0, ids))[0]


class Reference:
    """The block for one token at a time, float32, from the rules. Keys of past positions live in a dict."""

    def __init__(self, model, rope_theta: float = 10000.0) -> None:
        self.w = {name: weight.detach() for name, weight in model.state_dict().items()}
        self.config, self.rope_theta, self.keys = model.config, rope_theta, {}

    def norm(self, x: Tensor, name: str | None = None) -> Tensor:
        x = x / (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        return x if name is None else x * self.w[f"mtp.0.{name}.weight"]

    def rotate(self, x: Tensor, position: int) -> Tensor:
        d = self.config.qk_rope_head_dim
        angles = position * self.rope_theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        a, b = x[..., -d::2].double(), x[..., -d + 1 :: 2].double()
        turned = torch.stack((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
        return torch.cat((x[..., :-d], turned.flatten(-2).float()), -1)

    def site(self, streams: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        hc, eps = self.config.hc_mult, self.config.hc_eps
        mix = self.w[f"mtp.0.{name}.fn"] @ self.norm(streams.flatten())
        base, scale = self.w[f"mtp.0.{name}.base"], self.w[f"mtp.0.{name}.scale"]
        pre = torch.sigmoid(mix[:hc] * scale[0] + base[:hc]) + eps
        post = 2 * torch.sigmoid(mix[hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
        comb = (mix[2 * hc :] * scale[2] + base[2 * hc :]).view(hc, hc).softmax(-1) + eps
        comb = comb / (comb.sum(0, keepdim=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(1, keepdim=True) + eps)
            comb = comb / (comb.sum(0, keepdim=True) + eps)
        return pre @ streams, post, comb

    def attention(self, x: Tensor, position: int) -> Tensor:
        w, c = {k[11:]: v for k, v in self.w.items() if k.startswith("mtp.0.attn.")}, self.config
        q = w["wq_b.weight"] @ self.norm(w["wq_a.weight"] @ x, "attn.q_norm")
        q = self.rotate(self.norm(q.view(c.num_attention_heads, c.head_dim)), position)
        self.keys[position] = self.rotate(self.norm(w["wkv.weight"] @ x, "attn.kv_norm"), position)
        kv = torch.stack([self.keys[p] for p in range(position - c.sliding_window + 1, position + 1) if p in self.keys])
        scores = torch.cat((q @ kv.T / math.sqrt(c.head_dim), w["attn_sink"].unsqueeze(1)), 1).softmax(-1)
        out = self.rotate(scores[:, :-1] @ kv, -position).view(c.o_groups, -1)
        low_rank = torch.einsum("gi,goi->go", out, w["wo_a.weight"].view(c.o_groups, c.o_lora_rank, -1))
        return w["wo_b.weight"] @ low_rank.flatten()

    def experts(self, x: Tensor) -> Tensor:
        w, c = {k[10:]: v for k, v in self.w.items() if k.startswith("mtp.0.ffn.")}, self.config
        limit = c.swiglu_limit

        def ffn(w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
            gate, up = (w1 @ x).clamp(max=limit), (w3 @ x).clamp(-limit, limit)
            return w2 @ (gate * torch.sigmoid(gate) * up)

        scores = torch.nn.functional.softplus(w["gate.weight"] @ x).sqrt()
        chosen = (scores + w["gate.bias"]).topk(c.num_experts_per_tok).indices
        shares = scores[chosen] / scores[chosen].sum() * c.routed_scaling_factor
        pairs = zip(shares, chosen, strict=True)
        routed = sum(share * ffn(*w["experts.w13"][e].chunk(2), w["experts.w2"][e]) for share, e in pairs)
        return routed + ffn(*(w[f"shared_experts.{name}.weight"] for name in ("w1", "w3", "w2")))

    def __call__(self, hidden: Tensor, next_id: int, position: int) -> tuple[Tensor, Tensor]:
        """Streams [hc, D] of the pair's p and the token of p + 1, to (output streams, logits)."""
        e = self.w["mtp.0.e_proj.weight"] @ self.norm(self.w["embed.weight"][next_id], "enorm")
        x = torch.stack([self.w["mtp.0.h_proj.weight"] @ s + e for s in self.norm(hidden, "hnorm")])
        read, post, comb = self.site(x, "hc_attn")
        x = torch.outer(post, self.attention(self.norm(read, "attn_norm"), position)) + comb.T @ x
        read, post, comb = self.site(x, "hc_ffn")
        x = torch.outer(post, self.experts(self.norm(read, "ffn_norm"))) + comb.T @ x
        mix = self.w["mtp.0.hc_head.fn"] @ self.norm(x.flatten())
        pre = torch.sigmoid(mix * self.w["mtp.0.hc_head.scale"] + self.w["mtp.0.hc_head.base"]) + self.config.hc_eps
        return x, self.w["head.weight"] @ self.norm(pre @ x, "norm")


@pytest.fixture(params=list(CONFIGS))
def name(request) -> str:
    return request.param


def test_fixture_is_not_degenerate(name):
    """Every part of the pair matters: streams one by one, the next token, older pairs, and plain RoPE."""
    model, ids, streams = target(name)
    assert (model.config.compress_ratios[1] == 0) == (name == "layer_1_uncompressed")
    assert min(relative_difference(streams[100, a], streams[100, b]) for a, b in ((0, 1), (1, 2), (0, 2))) > 0.05
    base = reference_drafts(Reference(model), streams, ids, 100, 1)[0]
    assert base.std() > 0.5
    collapsed = streams.mean(1, keepdim=True).expand_as(streams)
    assert relative_difference(reference_drafts(Reference(model), collapsed, ids, 100, 1)[0], base) > 50 * TOLERANCE
    other = [*ids[:101], (ids[101] + 5) % TINY.vocab_size, *ids[102:]]
    assert relative_difference(reference_drafts(Reference(model), streams, other, 100, 1)[0], base) > 0.05
    older = streams.clone()
    older[100 - TINY.sliding_window + 1].neg_()
    assert relative_difference(reference_drafts(Reference(model), older, ids, 100, 1)[0], base) > 1e-3
    compress_base = Reference(model, rope_theta=TINY.compress_rope.theta)
    assert relative_difference(reference_drafts(compress_base, streams, ids, 100, 1)[0], base) > 1e-3


def reference_drafts(block: Reference, streams: Tensor, ids: list[int], position: int, depth: int) -> list[Tensor]:
    """Logits of drafts 1 … depth from `position`, over the target's pairs up to there."""
    hidden = logits = None
    for place in range(max(0, position - TINY.sliding_window + 1), position + 1):
        hidden, logits = block(streams[place], ids[place + 1], place)
    drafts = [logits]
    for step in range(1, depth):
        hidden, logits = block(hidden, ids[position + step + 1], position + step)
        drafts.append(logits)
    return drafts


def pairs(slot: int, start: int, end: int, ids: list[int]) -> Segment:
    """The pairs of positions start … end − 1."""
    return Segment(slot, start, ids[start + 1 : end + 1])


@pytest.mark.parametrize("chunk", (1, 7, LENGTH))
def test_drafts_three_deep(name, chunk):
    """Draft 2 reads draft 1's streams at the next position, draft 3 draft 2's; rows of three lengths at once."""
    model, ids, streams = target(name)
    harness = Harness(model)
    last = {}
    for slot, position in enumerate(POSITIONS):
        for start in range(0, position + 1, chunk if position < 200 else LENGTH):
            end = min(start + (chunk if position < 200 else LENGTH), position + 1)
            last[slot] = harness.mtp(streams[start:end], pairs(slot, start, end, ids))[-1:]
    hidden = torch.cat([last[slot] for slot in range(len(POSITIONS))])
    drafts = [model.mtp_logits(hidden)]
    for step in (1, 2):
        hidden = harness.mtp(hidden, *(pairs(s, p + step, p + step + 1, ids) for s, p in enumerate(POSITIONS)))
        drafts.append(model.mtp_logits(hidden))
    for slot, position in enumerate(POSITIONS):
        expected = reference_drafts(Reference(model), streams, ids, position, 3)
        assert relative_difference(expected[1], expected[0]) > 0.05
        for depth in range(3):
            assert relative_difference(drafts[depth][slot], expected[depth]) <= TOLERANCE, (position, depth + 1)


def test_committed_pairs_replace_drafted_ones(name):
    """Keys from drafted streams are rewritten from the target's once those tokens are committed."""
    model, ids, streams = target(name)
    harness, expected = Harness(model), Reference(model)
    start = 100
    hidden = harness.mtp(streams[: start + 1], pairs(0, 0, start + 1, ids))[-1:]
    wrong_ids = [(token + 9) % TINY.vocab_size for token in ids]
    for step in (1, 2):
        hidden = harness.mtp(hidden, pairs(0, start + step, start + step + 1, wrong_ids))
    drafted = harness.store.mtp[0].window[0, start + 1 : start + 3].clone()
    found = harness.mtp(streams[start + 1 : start + 4], pairs(0, start + 1, start + 4, ids))
    committed = harness.store.mtp[0].window[0, start + 1 : start + 3]
    assert relative_difference(committed, drafted) > 0.05, "the drafted keys must differ from the committed ones"
    for place in range(start - TINY.sliding_window + 1, start + 4):
        _, logits = expected(streams[place], ids[place + 1], place)
        if place > start:
            assert relative_difference(model.mtp_logits(found)[place - start - 1], logits) <= TOLERANCE, place
    stale = expected.keys[start + 1]
    assert relative_difference(committed[0], stale) <= TOLERANCE
    once = Harness(model)
    whole = once.mtp(streams[: start + 4], pairs(0, 0, start + 4, ids))
    assert torch.equal(found, whole[start + 1 :]), "bit-identical to a row that never drafted"


def test_drafting_leaves_the_target_alone(name):
    """The MTP block has its own state, whatever the ratio of the layer whose number it might borrow."""
    model, ids, _ = target(name)
    harness = Harness(model)
    streams = harness.streams(Segment(0, 0, ids[:100]))[0]
    before = [tensor.clone() for tensor in slot_tensors(harness.store)[:-1]]
    harness.mtp(streams, pairs(0, 0, 100, ids))
    assert harness.store.mtp[0].window[0, :100].abs().amax(-1).min() > 0.1
    after = slot_tensors(harness.store)[:-1]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("float32", "bfloat16"))
def test_keys_written_without_the_block_are_the_same(dtype):
    """A row that does not draft keeps its proposer state by keys alone; resuming, it drafts as if it always had."""
    model, ids = random_model(seed=3, dtype=dtype), random_ids(120, seed=0)
    drafting, resting = Harness(model), Harness(model)
    streams = drafting.streams(Segment(3, 0, ids))[0]
    drafting.mtp(streams[:100], pairs(3, 0, 100, ids))
    for start, end in ((0, 64), (64, 65), (65, 100)):
        view = resting.view([pairs(3, start, end, ids)])
        mtp_write(model, resting.tables, resting.store, view, streams[start:end])
    keys = drafting.store.mtp[0].window[3, :100]
    assert keys.abs().amax(-1).min() > 0.1
    assert torch.equal(resting.store.mtp[0].window, drafting.store.mtp[0].window)
    resumed = (harness.mtp(streams[100:101], pairs(3, 100, 101, ids)) for harness in (resting, drafting))
    assert torch.equal(*resumed)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("float32", "bfloat16"))
def test_draft_chains_do_not_depend_on_neighbours(dtype):
    """Eight rows at eight lengths make one forward per chain step; each row equals itself alone, bit for bit."""
    model = random_model(seed=3, dtype=dtype)
    lengths = (3, 61, 62, 100, 127, 128, 201, 255)
    streams_of = [random_ids(length + 4, seed=30 + slot) for slot, length in enumerate(lengths)]

    def chain(order: list[int]) -> dict[int, Tensor]:
        harness = Harness(model)
        targets = harness.streams(*(Segment(s, 0, streams_of[s][: lengths[s]]) for s in order))
        segments = [pairs(s, 0, lengths[s], streams_of[s]) for s in order]
        streams = harness.mtp(torch.cat(targets), *segments)
        hidden = torch.stack([part[-1] for part in streams.split([lengths[s] for s in order])])
        steps = [hidden]
        for step in (1, 2):
            hidden = harness.mtp(
                hidden, *(pairs(s, lengths[s] - 1 + step, lengths[s] + step, streams_of[s]) for s in order)
            )
            steps.append(hidden)
        logits = torch.stack([model.mtp_logits(hidden) for hidden in steps], dim=1)
        return dict(zip(order, logits, strict=True))

    together = chain([5, 2, 7, 0, 1, 6, 3, 4])
    assert min(relative_difference(together[s][2], together[s + 1][2]) for s in range(7)) > 0.05
    for slot in range(8):
        assert torch.equal(chain([slot])[slot], together[slot]), lengths[slot]


def test_full_sequence_forward_equals_the_cached_one(name):
    """The dense way through the same weights, which trains the demo model."""
    model = target(name)[0]
    ids = ids_with_clear_choices(model, LENGTH)
    harness = Harness(model)
    full = full_forward(model, torch.tensor([ids]), harness.tables).streams[0]
    assert relative_difference(full, harness.streams(Segment(0, 0, ids))[0]) <= TOLERANCE


def test_full_sequence_batch_keeps_its_rows_apart():
    model = target("layer_1_compressed")[0]
    harness = Harness(model)
    rows = [random_ids(60, seed=seed) for seed in (1, 2)]
    both = full_forward(model, torch.tensor(rows), harness.tables, with_indexer_loss=True)
    assert relative_difference(both.streams[0], both.streams[1]) > 0.1
    assert len(both.indexer_losses) == 2 and all(loss > 0 for loss in both.indexer_losses)
    for row, ids in zip(both.streams, rows, strict=True):
        assert relative_difference(row, full_forward(model, torch.tensor([ids]), harness.tables).streams[0]) <= 1e-4


def test_full_sequence_chain_equals_cached_drafting(name):
    """Every chain that starts at any position, three deep, against drafting from that position."""
    model, ids, streams = target(name)
    harness = Harness(model)
    chain = full_mtp_chain(model, streams.unsqueeze(0), torch.tensor([ids]), harness.tables, 3)
    assert [part.shape[1] for part in chain] == [LENGTH - 1, LENGTH - 2, LENGTH - 3]
    for position in (0, 1, 14, 15, 16, 17, 31, 63, 64, 100, 260, LENGTH - 4):
        hidden = harness.mtp(streams[: position + 1], pairs(0, 0, position + 1, ids))[-1:]
        drafts = [hidden]
        for step in (1, 2):
            drafts.append(harness.mtp(drafts[-1], pairs(0, position + step, position + step + 1, ids)))
        for depth, draft in enumerate(drafts):
            full = chain[depth][0, position]
            assert relative_difference(full, draft[0]) <= TOLERANCE, (position, depth + 1)
