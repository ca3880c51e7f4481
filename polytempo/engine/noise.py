"""Counter-based noise: a pure function of (seed, choice, position, token id), with no state to lose or share.

Because nothing is counted, a token's noise is the same alone, in any batch, drafted or verified, after a
preemption and on any step. Source: Philox4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3".
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import torch
from torch import Tensor

from polytempo.device import to_device
from polytempo.types import SEED_MAX

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LANES = 4
# Counters worked on at once: the temporaries of 2**16 int64 counters stay in a CPU's L2 cache (2 MiB).
_CHUNK = {"cpu": 1 << 16}
_DEVICE_CHUNK = 1 << 22


def resolve_seed(seed: int | None) -> int:
    """The request's own seed, or a fresh one from the operating system, so that unseeded requests differ."""
    return secrets.randbelow(SEED_MAX + 1) if seed is None else seed


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10 on tensors.

    Args:
        counter: [4, N, M] int64, 32-bit words.
        key: [2, N, 1] int64, 32-bit words.

    Returns:
        [4, N, M] int64, 32-bit words.

    Source: Salmon et al. 2011, section 3.
    """
    # The paper multiplies words (0, 2) and mixes (3, 1) and the swapped key into the high halves, which gives
    # the new words (2, 0); the low halves are the new (3, 1). Both pairs go through each operator as one tensor,
    # because at small vocabularies the number of operators is the cost.
    multiplied, mixed = counter[0::2], counter[1::2].flip(0)
    # A multiplier enters as itself - 2**32, so that the signed 64-bit product cannot overflow; the words * 2**32
    # that this lacks are added to the high half.
    constants = [to_device(pair, counter.device).view(2, 1, 1) for pair in (_MULTIPLIERS, _KEY_STEPS)]
    multipliers, key_steps = constants[0] - (1 << 32), constants[1]
    rounds = torch.arange(_ROUNDS, device=counter.device).view(-1, 1, 1, 1)
    swapped_keys = ((key + rounds * key_steps) & _MASK).flip(1)
    for round_key in swapped_keys:
        product = multiplied * multipliers
        low = product & _MASK
        product >>= 32
        product += multiplied
        product ^= mixed
        product ^= round_key
        product &= _MASK
        multiplied, mixed = product.flip(0), low
    return torch.stack((multiplied[0], mixed[1], multiplied[1], mixed[0]))


def _to_uniform(words: Tensor) -> Tensor:
    """Numbers inside (0, 1) from 32-bit words, exactly: half a step of offset keeps both ends out."""
    return (words.double() + 0.5) * 2.0**-32


def _to_gumbel(numbers: Tensor) -> Tensor:
    """Gumbel noise from uniform numbers, in their place."""
    return numbers.log_().neg_().log_().neg_()


def _blocks(seeds: Tensor, choices: Tensor, positions: Tensor, groups: Tensor) -> Tensor:
    """Philox words [4, N, G] of token groups [1 or N, G]; seeds, choices and positions are [N]."""
    address = torch.stack((positions, choices, seeds, seeds >> 32)).unsqueeze(-1) & _MASK
    counter = torch.broadcast_tensors(groups, address[0], address[1], torch.zeros_like(groups))
    return philox4x32(torch.stack(counter), address[2:])


def gumbel_noise(seeds: Tensor, choices: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise of chosen tokens.

    Args:
        seeds: [N] int64, the requests' seeds; all 64 bits count.
        choices: [N] int64, which of a request's n choices, 0..2**32 - 1.
        positions: [N] int64, absolute index of the token to be drawn, 0..2**32 - 1.
        token_ids: [N, M] int64, >= 0.

    Returns:
        [N, M] float64, each within (-3.2, 22.9).
    """
    num_rows, width = token_ids.shape
    out = torch.empty(num_rows, width, dtype=torch.float64, device=token_ids.device)
    for rows, columns in _tiles(num_rows, width, token_ids.device):
        ids = token_ids[rows, columns]
        words = _blocks(seeds[rows], choices[rows], positions[rows], ids // _LANES)
        out[rows, columns] = _to_gumbel(_to_uniform(words.gather(0, (ids % _LANES).unsqueeze(0)).squeeze(0)))
    return out


Uniform = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""`uniform`, or a kernel that gives the same."""


def uniform(seeds: Tensor, choices: Tensor, positions: Tensor, num_groups: int) -> Tensor:
    """The random numbers behind the noise of tokens 0..4 G - 1; kernels: ops.uniform, with the same bits.

    Args:
        seeds: [N] int64, as in `gumbel_noise`.
        choices: [N] int64.
        positions: [N] int64.
        num_groups: G; token t is word t % 4 of group t // 4.

    Returns:
        [N, 4 G] float64, inside (0, 1).
    """
    num_rows = seeds.shape[0]
    out = torch.empty(num_rows, num_groups * _LANES, dtype=torch.float64, device=seeds.device)
    all_groups = torch.arange(num_groups, device=seeds.device).unsqueeze(0)
    for rows, columns in _tiles(num_rows, num_groups, seeds.device):
        words = _blocks(seeds[rows], choices[rows], positions[rows], all_groups[:, columns])
        out[rows, columns.start * _LANES : columns.stop * _LANES] = _to_uniform(words.movedim(0, -1).flatten(1))
    return out


def gumbel_noise_vocab(
    seeds: Tensor, choices: Tensor, positions: Tensor, vocab_size: int, draw_uniform: Uniform = uniform
) -> Tensor:
    """Gumbel noise of all tokens 0..vocab_size - 1, at a quarter of the cost per token.

    Args:
        seeds: [N] int64, as in `gumbel_noise`.
        choices: [N] int64.
        positions: [N] int64.
        vocab_size: V.
        draw_uniform: `uniform` or the kernels'.

    Returns:
        [N, V] float64; column t equals `gumbel_noise` of token t bit for bit.
    """
    out = draw_uniform(seeds, choices, positions, -(-vocab_size // _LANES))
    for rows, columns in _tiles(*out.shape, out.device):
        _to_gumbel(out[rows, columns])
    return out[:, :vocab_size]


def _tiles(num_rows: int, width: int, device: torch.device) -> list[tuple[slice, slice]]:
    """Rectangles that cover [num_rows, width], each of a bounded number of elements."""
    limit = _CHUNK.get(device.type, _DEVICE_CHUNK)
    columns = max(1, min(width, limit))
    rows = max(1, limit // columns)
    return [
        (slice(r, min(r + rows, num_rows)), slice(c, min(c + columns, width)))
        for r in range(0, num_rows, rows)
        for c in range(0, width, columns)
    ]
