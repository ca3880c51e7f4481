"""RoPE against a direct float64 formula: bases, YaRN's ramp, amplitude, and where entries and outputs rotate.

Tolerance: tables are float32. An angle is position · frequency; the frequency's relative error is a few float32
roundings (the exponent's, the power's, the quotient's) and the product adds one more, so an angle is off by at
most 2^-20 of itself; cos and sin add 1e-6. Wrong bases and ramps are off by far more, which is asserted.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import TINY, Harness, random_ids, random_model

from polytempo.config import ModelConfig, RopeConfig
from polytempo.model.rope import RopeTables, inverse_frequencies, rotate

POSITIONS = (0, 1, 127, 128, 4095, 65535, 65536, 200000)
ROPE_DIM = 64
PLAIN = RopeConfig(theta=10000.0)
YARN = RopeConfig(theta=160000.0, factor=16.0, original_max_position_embeddings=65536)
PUBLISHED = replace(TINY, head_dim=512, index_head_dim=128, qk_rope_head_dim=ROPE_DIM, rope=PLAIN, compress_rope=YARN)


def direct_frequencies(rope: RopeConfig) -> np.ndarray:
    """theta^(-2i/d) for pair i; YaRN blends it with itself over `factor`, by how often the pair turns in context."""
    frequencies = []
    for pair in range(ROPE_DIM // 2):
        kept = rope.theta ** (-2 * pair / ROPE_DIM)
        if rope.factor == 1.0:
            frequencies.append(kept)
            continue

        def pair_that_turns(times: float) -> float:
            turns = rope.original_max_position_embeddings / (2 * math.pi * times)
            return ROPE_DIM / 2 * math.log(turns) / math.log(rope.theta)

        low = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(rope.beta_slow)), ROPE_DIM - 1)
        ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
        frequencies.append(kept * (1 - ramp) + kept / rope.factor * ramp)
    return np.array(frequencies)


def tolerances(angles: np.ndarray) -> np.ndarray:
    return 1e-6 + angles * 2.0**-20


@pytest.fixture(scope="module")
def tables() -> RopeTables:
    return RopeTables.build(PUBLISHED, max(POSITIONS) + 1)


@pytest.mark.parametrize("ratio", (0, 4, 128))
def test_tables_equal_the_formula(tables, ratio):
    table = tables.for_ratio(ratio).at(torch.tensor(POSITIONS))
    rope, other = (YARN, PLAIN) if ratio else (PLAIN, YARN)
    assert PUBLISHED.rope_for(ratio) == rope
    angles = np.outer(POSITIONS, direct_frequencies(rope))
    for ours, exact in ((table.cos, np.cos(angles)), (table.sin, np.sin(angles))):
        assert (np.abs(ours.numpy() - exact) <= tolerances(angles)).all()
    # What must not pass: the other base, and this base without (or with) YaRN.
    swapped = replace(rope, factor=1.0 if ratio else 16.0, original_max_position_embeddings=65536)
    for wrong in (other, swapped):
        wrong_angles = np.outer(POSITIONS, direct_frequencies(wrong))
        beyond = np.abs(table.cos.numpy() - np.cos(wrong_angles)) > 4 * tolerances(np.maximum(angles, wrong_angles))
        assert beyond[2:].any(axis=1).all(), "the tolerance would let another table pass"


def test_ratio_0_layers_and_the_mtp_block_share_the_plain_table(tables):
    assert tables.for_ratio(0) is tables.plain
    assert tables.for_ratio(4) is tables.compress and tables.for_ratio(128) is tables.compress
    assert PUBLISHED.mtp_compress_ratios == (0,)


def test_yarn_ramp_at_factor_16_beta_32_1():
    """Fast pairs are kept, slow pairs are divided by 16, the ramp between them is linear in the pair."""
    frequencies = inverse_frequencies(YARN, ROPE_DIM).double().numpy()
    kept = 160000.0 ** (-np.arange(0, ROPE_DIM, 2) / ROPE_DIM)
    np.testing.assert_allclose(frequencies, direct_frequencies(YARN), rtol=2e-6)
    share = frequencies / kept
    # A pair that turns 32 times in 65536 positions is pair 15.5, one that turns once is pair 24.7.
    np.testing.assert_allclose(share[:16], 1.0, rtol=2e-6)
    np.testing.assert_allclose(share[25:], 1 / 16, rtol=2e-6)
    steps = np.diff(share[15:26])
    np.testing.assert_allclose(steps, -(1 - 1 / 16) / 10, rtol=1e-4)


def test_no_amplitude_unless_the_config_says_so(tables):
    """Attention logits of compressed layers came out 1.63 times too large: (0.1 · ln 16 + 1)² of YaRN's amplitude."""
    for table in (tables.plain, tables.compress):
        norms = table.cos.double() ** 2 + table.sin.double() ** 2
        assert (norms - 1).abs().max() < 1e-6
    assert abs((0.1 * math.log(16) + 1) ** 2 - 1.63) < 0.01
    explicit = replace(PUBLISHED, compress_rope=replace(YARN, attention_factor=1.25))
    loud = RopeTables.build(explicit, 300)
    assert ((loud.compress.cos.double() ** 2 + loud.compress.sin.double() ** 2) - 1.25**2).abs().max() < 1e-5
    assert ((loud.plain.cos.double() ** 2 + loud.plain.sin.double() ** 2) - 1).abs().max() < 1e-6


def raw_config(**scaling) -> dict:
    names = ("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
             "q_lora_rank", "o_groups", "o_lora_rank", "n_routed_experts", "num_experts_per_tok")  # fmt: skip
    raw = {name: getattr(TINY, name) for name in names}
    raw |= {"head_dim": 512, "qk_rope_head_dim": ROPE_DIM, "compress_ratios": [0, 4, 128, 4]}
    raw |= {"rope_theta": 10000.0, "compress_rope_theta": 160000.0}
    yarn = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    return raw | {"rope_scaling": yarn | scaling}


def test_rope_scaling_is_read_from_the_config():
    config = ModelConfig.from_dict(raw_config())
    assert (config.rope, config.compress_rope) == (PLAIN, YARN)
    assert ModelConfig.from_dict(raw_config(attention_factor=1.25)).compress_rope.attention_factor == 1.25
    assert ModelConfig.from_dict(raw_config(factor=4)).compress_rope.factor == 4


def test_softmax_scale_has_no_yarn_term():
    model = random_model(seed=3)
    for layer, ratio in zip((*model.layers, *model.mtp), (*TINY.compress_ratios, 0), strict=True):
        assert layer.attn.ratio == ratio
        assert layer.attn.scale == TINY.head_dim**-0.5


def direct_rotation(x: torch.Tensor, angles: np.ndarray) -> np.ndarray:
    """Trailing channels as complex numbers (2i, 2i + 1), times e^(i·angle), in float64."""
    still, turning = np.split(x.double().numpy(), [x.shape[-1] - 2 * angles.shape[-1]], axis=-1)
    turned = (turning[..., 0::2] + 1j * turning[..., 1::2]) * np.exp(1j * angles)
    return np.concatenate((still, np.stack((turned.real, turned.imag), -1).reshape(turning.shape)), axis=-1)


def test_rotation_turns_interleaved_trailing_pairs_and_its_inverse_undoes_it(tables):
    positions = torch.tensor([0, 1, 5, 127, 300])
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    for ratio, rope in ((0, PLAIN), (4, YARN)):
        angles = tables.for_ratio(ratio).at(positions)
        rotated = rotate(x, angles)
        exact = direct_rotation(x, np.outer(positions.numpy(), direct_frequencies(rope)))
        assert np.abs(rotated.numpy() - exact).max() < 2e-3 and (rotated - x)[1:].abs().max() > 0.5
        assert np.abs(rotated.numpy() - exact)[:4].max() < 5e-4
        assert (rotate(rotated, angles.inverse()) - x).abs().max() < 1e-5
        other_base = tables.for_ratio(128 - 128 * bool(ratio)).at(positions).inverse()
        assert (rotate(rotated, other_base) - x).abs().max() > 0.1


@pytest.mark.parametrize("layer_idx, ratio", ((1, 4), (2, 128)))
def test_entry_is_rotated_at_its_first_position(layer_idx, ratio):
    """Compressed keys were never rotated: entry e turns by position e · ratio, with the compress table."""
    harness = Harness(random_model(seed=3))
    attn = harness.model.layers[layer_idx].attn
    for compressor in (attn.compressor, *([attn.indexer.compressor] if ratio == 4 else [])):
        num_entries, width = 5, compressor.wkv.weight.shape[0]
        generator = torch.Generator().manual_seed(1)
        kv, gate = (torch.randn(num_entries, compressor.num_inputs, width, generator=generator) for _ in range(2))
        entry_ids = torch.arange(num_entries)
        table = harness.tables.for_ratio(ratio)
        entries = compressor.entries(kv, gate, entry_ids, table)
        pooled = compressor.pool(kv, gate, entry_ids)
        frequencies = inverse_frequencies(TINY.compress_rope, TINY.qk_rope_head_dim).double().numpy()
        exact = direct_rotation(pooled, np.outer(entry_ids.numpy() * ratio, frequencies))
        assert np.abs(entries.numpy() - exact).max() < 1e-3
        assert (entries - pooled)[1:].abs().amax(-1).min() > 0.1


@pytest.mark.twin
def test_stored_entries_carry_that_rotation():
    """The cached path hands the compressor the entry's own number, whatever chunk completes it."""
    ids, harness = random_ids(300, seed=0), Harness(random_model(seed=3))
    seen = []
    compressor = harness.model.layers[2].attn.compressor
    original = compressor.entries
    compressor.entries = lambda kv, gate, entry_ids, table: (
        seen.append((entry_ids.tolist(), table)) or original(kv, gate, entry_ids, table)
    )
    harness.prefill(ids, [100])
    assert [entry_ids for entry_ids, _ in seen] == [[0], [1]]
    assert all(table is harness.tables.compress for _, table in seen)
