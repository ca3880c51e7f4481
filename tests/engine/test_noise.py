"""The noise is Philox4x32-10, a pure function of its address, Gumbel distributed and independent across it."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from polytempo.engine.noise import gumbel_noise, gumbel_noise_vocab, philox4x32, resolve_seed

# Salmon et al. 2011, known-answer vectors: counter, key, answer.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


def philox_twin(counter, key):
    """The algorithm once more, in plain integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(right >> 32) ^ c[1] ^ k[0], right % 2**32, (left >> 32) ^ c[3] ^ k[1], left % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def gumbel_twin(seed, choice, position, token_id):
    seed %= 2**64
    lanes = philox_twin([token_id // 4, position, choice, 0], [seed % 2**32, seed >> 32])
    return -math.log(-math.log((lanes[token_id % 4] + 0.5) / 2**32))


def tensor(*values):
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter, key, answer):
    got = philox4x32(tensor(*words(counter)).view(4, 1, 1), tensor(*words(key)).view(2, 1, 1))
    assert got.flatten().tolist() == words(answer)
    assert philox_twin(words(counter), words(key)) == words(answer)


def test_noise_equals_the_plain_twin_at_addresses_with_all_bits():
    addresses = [
        (0, 0, 0, 0),
        (1, 0, 5, 3),
        (-1, 2, 70000, 129279),
        (2**63 - 1, 7, 2**31 + 5, 4),
        (-(2**63), 2**31 + 1, 1, 6),
        (0x123456789ABCDEF0, 3, 17, 2),
    ]
    seeds, choices, positions, ids = (tensor(*column) for column in zip(*addresses, strict=True))
    noise = gumbel_noise(seeds, choices, positions, ids.unsqueeze(-1)).squeeze(-1)
    expected = torch.tensor([gumbel_twin(*address) for address in addresses], dtype=torch.float64)
    torch.testing.assert_close(noise, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 257, 129280])
def test_vocabulary_noise_equals_single_noise_bit_for_bit(vocab_size):
    seeds, choices, positions = tensor(3, -9), tensor(0, 2), tensor(11, 12)
    whole = gumbel_noise_vocab(seeds, choices, positions, vocab_size)
    assert whole.shape == (2, vocab_size)
    picked = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))[:997].expand(2, -1)
    assert torch.equal(gumbel_noise(seeds, choices, positions, picked), whole.gather(-1, picked))


def test_a_rows_noise_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**62), 2**62, (40,), generator=generator)
    choices, positions = torch.arange(40) % 3, torch.arange(40) * 7
    ids = torch.randint(0, 5000, (40, 31), generator=generator)
    alone = [gumbel_noise(seeds[[i]], choices[[i]], positions[[i]], ids[[i]])[0] for i in range(40)]
    alone_vocab = [gumbel_noise_vocab(seeds[[i]], choices[[i]], positions[[i]], 1003)[0] for i in range(40)]
    for num_rows in range(1, 41):
        order = torch.randperm(40, generator=generator)[:num_rows]
        together = gumbel_noise(seeds[order], choices[order], positions[order], ids[order])
        vocab = gumbel_noise_vocab(seeds[order], choices[order], positions[order], 1003)
        for row_idx, i in enumerate(order.tolist()):
            assert torch.equal(together[row_idx], alone[i])
            assert torch.equal(vocab[row_idx], alone_vocab[i])


def test_law_is_gumbel():
    noise = gumbel_noise_vocab(tensor(42), tensor(0), tensor(9), 100_000)[0].numpy()
    assert np.isfinite(noise).all()
    assert scipy.stats.kstest(noise, "gumbel_r").pvalue > 1e-3
    assert scipy.stats.kstest(noise * 1.02, "gumbel_r").pvalue < 1e-3, "the test must see a 2 % error"


AXES = ["low seed", "high seed", "choice", "position", "token", "token group"]


@pytest.mark.parametrize("axis", AXES)
def test_neighbouring_addresses_are_independent(axis):
    count = 50_000
    run = torch.arange(count)
    low, high, choice, position, token, group = ((run if axis == name else run * 0) for name in AXES)
    seeds = low * 2 + (high << 32)
    ids = (token + 4 * group).unsqueeze(-1)
    noise = gumbel_noise(seeds, choice, position, ids).squeeze(-1).numpy()
    assert len(np.unique(noise)) > 0.9999 * count
    first = np.searchsorted(np.quantile(noise, np.linspace(0, 1, 9)[1:-1]), noise)
    for lag in (1, 2, 4):
        table = np.zeros((8, 8))
        np.add.at(table, (first[:-lag], first[lag:]), 1)
        assert scipy.stats.chi2_contingency(table).pvalue > 1e-4


def test_unseeded_requests_get_different_seeds_and_seeded_ones_their_own():
    fresh = {resolve_seed(None) for _ in range(200)}
    assert len(fresh) == 200
    assert all(0 <= seed < 2**63 for seed in fresh)
    assert resolve_seed(0) == 0 and resolve_seed(-5) == -5
