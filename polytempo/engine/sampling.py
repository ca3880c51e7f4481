"""From logits to tokens, one packed position at a time: constraints, penalties, filters, noise, argmax.

A position carries everything its token depends on, so with speculation a row's verify positions are simply
several positions whose output already holds the drafts before them. Knows nothing of rows, drafts or caches.

Every result is a function of its own logits row and its own position alone, bit for bit: all operations are
elementwise, exact (max, integer keys, counts) or run along one row in a fixed order (the cumulative sum).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from polytempo.device import to_device
from polytempo.engine.logprobs import first_argmax, ranked_ids
from polytempo.engine.noise import Uniform, gumbel_noise, gumbel_noise_vocab, uniform
from polytempo.engine.sampling_position import SamplingPosition
from polytempo.errors import InvariantError
from polytempo.model.ops import prefix_sum

NO_TOKEN = -1
# Beyond these, float32 scaling would overflow to inf or divide 0 by 0. A temperature below the first already
# decides every difference that float32 logits can have; one above the second is already uniform.
_TEMPERATURE_RANGE = (1e-20, 1e20)


@dataclass(frozen=True)
class SampledTokens:
    """One token per position, or a reason why there is none.

    Attributes:
        token_ids: [N] int64; NO_TOKEN where there is none, never 0 in its place.
        is_finite: [N] bool; False if the logits hold NaN or +inf or are all -inf.
        has_candidates: [N] bool; False if the request's own constraints left no token.
    """

    token_ids: Tensor
    is_finite: Tensor
    has_candidates: Tensor

    def failures(self, token_ids: Sequence[int] | None = None) -> dict[int, str]:
        """Why each position without a token has none, by its index; empty in the normal case.

        Args:
            token_ids: the same ids on the host, from callers that have them: to read them waits for the device.
        """
        token_ids = self.token_ids.tolist() if token_ids is None else token_ids
        failed = [index for index, token_id in enumerate(token_ids) if token_id == NO_TOKEN]
        return {
            index: "allowed_token_ids, the grammar, bad_words and min_tokens together leave no token to draw"
            if bool(self.is_finite[index])
            else "the logits are not finite (NaN, +inf, or nothing above -inf)"
            for index in failed
        }


Greedy = Callable[[Tensor], Tensor]
"""`greedy`, or a kernel that gives the same."""


def greedy(logits: Tensor) -> Tensor:
    """Each row's highest logit.

    Args:
        logits: [N, V], any float dtype.

    Returns:
        [N] int64, the lowest id among equals; NO_TOKEN for a row with NaN or +inf, or with nothing above -inf.
    """
    is_finite = logits.amax(-1).abs() < torch.inf
    return first_argmax(logits).masked_fill_(~is_finite, NO_TOKEN)


@dataclass(frozen=True)
class SamplingOps:
    """What sampling leaves to the kernels where there are any.

    Attributes:
        greedy: `greedy`, for the positions that nothing but the logits decides.
        uniform: `noise.uniform`, for draws from the whole vocabulary.
    """

    greedy: Greedy = greedy
    uniform: Uniform = uniform


TORCH = SamplingOps()


def sample(logits: Tensor, positions: Sequence[SamplingPosition], ops: SamplingOps = TORCH) -> SampledTokens:
    """Draw one token at every position.

    Greedy positions take the highest processed logit; others take the argmax of processed logits / temperature
    + Gumbel noise among the tokens that survive the filters, which is a draw from their softmax. Equal scores
    go to the lowest id.

    Args:
        logits: [N, V], any float dtype; not modified.
        positions: N positions in the order of the logits' rows.
        ops: torch's or the kernels' operations.

    Returns:
        SampledTokens for the N positions.

    Raises:
        InvariantError: logits and positions disagree in number.

    Source: Gumbel-max trick; drafter-invariant use after arXiv 2408.07978.
    """
    if logits.dim() != 2 or logits.shape[0] != len(positions):
        raise InvariantError(f"sample: logits {tuple(logits.shape)} for {len(positions)} positions")
    if logits.dtype == torch.float64:
        logits = logits.float()
    plain: list[int] = []
    other: list[int] = []
    for index, position in enumerate(positions):
        (plain if position.is_plain else other).append(index)
    if not other:
        return _sample_plain(logits, ops)
    if not plain:
        return _sample_processed(logits, positions, ops)
    order = to_device(plain + other, logits.device)
    first = _sample_plain(logits[order[: len(plain)]], ops)
    second = _sample_processed(logits[order[len(plain) :]], [positions[i] for i in other], ops)
    place = order.argsort()
    return SampledTokens(
        torch.cat([first.token_ids, second.token_ids])[place],
        torch.cat([first.is_finite, second.is_finite])[place],
        torch.cat([first.has_candidates, second.has_candidates])[place],
    )


def _sample_plain(logits: Tensor, ops: SamplingOps) -> SampledTokens:
    """Greedy without options."""
    token_ids = ops.greedy(logits)
    is_finite = token_ids != NO_TOKEN
    return SampledTokens(token_ids, is_finite, torch.ones_like(is_finite))


def _sample_processed(logits: Tensor, positions: Sequence[SamplingPosition], ops: SamplingOps) -> SampledTokens:
    raw_best = logits.amax(-1)
    processed = process_logits(logits, positions)
    best = processed.amax(-1)
    # A tiny repetition penalty can push a finite logit to +inf: that too is no answer.
    is_finite = raw_best.isfinite() & ~best.isnan() & (best != torch.inf)
    has_candidates = ~is_finite | best.isfinite()
    token_ids = torch.empty(len(positions), dtype=torch.int64, device=logits.device)
    for draw, members in _by_draw(positions, ops).items():
        rows = to_device(members, logits.device)
        token_ids[rows] = draw(processed[rows], [positions[i] for i in members])
    token_ids.masked_fill_(~(is_finite & has_candidates), NO_TOKEN)
    return SampledTokens(token_ids, is_finite, has_candidates)


_Draw = Callable[[Tensor, Sequence[SamplingPosition]], Tensor]


def _by_draw(positions: Sequence[SamplingPosition], ops: SamplingOps) -> dict[_Draw, list[int]]:
    """Indices of the positions by the cheapest way to draw them."""
    groups: dict[_Draw, list[int]] = {}
    draw_all = partial(_draw_all, draw_uniform=ops.uniform)
    for index, position in enumerate(positions):
        params = position.params
        if params.is_greedy:
            draw: _Draw = _draw_greedy
        elif params.top_k > 0:
            draw = _draw_top_k
        elif params.top_p < 1:
            draw = _draw_ranked
        else:
            draw = draw_all
        groups.setdefault(draw, []).append(index)
    return groups


# --- constraints, bias and penalties ------------------------------------------------------------------------


def process_logits(logits: Tensor, positions: Sequence[SamplingPosition]) -> Tensor:
    """Logits after everything that comes before temperature, in the order of `SamplingParams`.

    Args:
        logits: [N, V], any float dtype; not modified.
        positions: N positions.

    Returns:
        [N, V] float32, banned tokens at -inf.
    """
    logits = logits.to(torch.float32, copy=True)
    _restrict(logits, positions)
    _ban(logits, positions)
    _add_bias(logits, positions)
    penalised = [i for i, p in enumerate(positions) if p.params.has_penalties]
    if penalised:
        rows = to_device(penalised, logits.device)
        logits[rows] = _penalise(logits[rows], [positions[i] for i in penalised])
    return logits


def _restrict(logits: Tensor, positions: Sequence[SamplingPosition]) -> None:
    for row_idx, position in enumerate(positions):
        if position.params.allowed_token_ids:
            allowed = to_device(position.params.allowed_array, logits.device)
            kept = logits[row_idx, allowed]
            logits[row_idx] = -torch.inf
            logits[row_idx, allowed] = kept
        if position.grammar_mask is not None:
            bits = np.unpackbits(np.frombuffer(position.grammar_mask, np.uint8), bitorder="little")
            allows = to_device(bits[: logits.shape[-1]], logits.device).bool()
            logits[row_idx].masked_fill_(~allows, -torch.inf)


def _ban(logits: Tensor, positions: Sequence[SamplingPosition]) -> None:
    rows: list[int] = []
    ids: list[int] = []
    for row_idx, position in enumerate(positions):
        banned = set()
        if position.bad_words:
            banned = position.bad_words.banned_after(position.prompt_token_ids, position.history)
        if position.bans_stops:
            banned |= position.stop_token_ids
        rows += [row_idx] * len(banned)
        ids += banned
    if rows:
        logits[tuple(to_device([rows, ids], logits.device))] = -torch.inf


def _add_bias(logits: Tensor, positions: Sequence[SamplingPosition]) -> None:
    biased = [(i, t, b) for i, p in enumerate(positions) for t, b in (p.params.logit_bias or {}).items()]
    if biased:
        rows, ids, values = (list(column) for column in zip(*biased, strict=True))
        place = tuple(to_device([rows, ids], logits.device))
        logits[place] += to_device(values, logits.device, torch.float32)


def _count(like: Tensor, histories: Sequence[Sequence[int]]) -> Tensor:
    """How often each token occurs in each of N histories: [N, V] float32, exact below 2**24 occurrences."""
    num_rows, vocab_size = like.shape
    lengths = [len(history) for history in histories]
    ids = np.fromiter(chain.from_iterable(histories), np.int64, sum(lengths))
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise InvariantError(f"token ids {ids.min()}..{ids.max()} beside logits of {vocab_size} tokens")
    cells = to_device(np.arange(num_rows).repeat(lengths) * vocab_size + ids, like.device)
    # Not bincount, which waits for the device to learn the size of its result. Sums of ones are exact in any order.
    counts = torch.zeros(num_rows * vocab_size, dtype=torch.float32, device=like.device)
    return counts.index_add_(0, cells, torch.ones_like(cells, dtype=torch.float32)).view(num_rows, vocab_size)


def _column(positions: Sequence[SamplingPosition], name: str, like: Tensor) -> Tensor:
    """One option of all positions as [N, 1] in the dtype of `like`."""
    values = [getattr(position.params, name) for position in positions]
    return to_device(values, like.device, like.dtype).unsqueeze(-1)


def _penalise(logits: Tensor, positions: Sequence[SamplingPosition]) -> Tensor:
    """Repetition over prompt and output; presence and frequency over the output only."""
    in_output = _count(logits, [p.history for p in positions])
    in_prompt = _count(
        logits, [p.prompt_token_ids if p.params.repetition_penalty != 1 else () for p in positions]
    )
    repetition = _column(positions, "repetition_penalty", logits)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_output + in_prompt > 0, repeated, logits)
    logits = logits - _column(positions, "frequency_penalty", logits) * in_output
    return logits - _column(positions, "presence_penalty", logits) * (in_output > 0)


# --- drawing: processed logits [N, V] float32 -> token ids [N] int64 ----------------------------------------


def _draw_greedy(logits: Tensor, positions: Sequence[SamplingPosition]) -> Tensor:
    return first_argmax(logits)


def _draw_all(logits: Tensor, positions: Sequence[SamplingPosition], draw_uniform: Uniform) -> Tensor:
    scaled = _scale(logits, positions)
    scaled = scaled.masked_fill_(scaled.exp() < _column(positions, "min_p", scaled), -torch.inf)
    noise = gumbel_noise_vocab(*_noise_address(positions, logits.device), logits.shape[-1], draw_uniform)
    return first_argmax(scaled.double() + noise)


def _draw_top_k(logits: Tensor, positions: Sequence[SamplingPosition]) -> Tensor:
    width = min(max(p.params.top_k for p in positions), logits.shape[-1])
    return _draw_among(logits, ranked_ids(logits, width), positions)


def _draw_ranked(logits: Tensor, positions: Sequence[SamplingPosition]) -> Tensor:
    return _draw_among(logits, ranked_ids(logits, logits.shape[-1]), positions)


def _draw_among(logits: Tensor, ids: Tensor, positions: Sequence[SamplingPosition]) -> Tensor:
    """Filter the ranked candidates ids [N, K], then draw; every filter keeps a prefix of the ranking."""
    scaled = _scale(logits, positions).gather(-1, ids)
    keep = _filter(scaled, positions)
    if keep.device.type == "cpu":  # elsewhere noise that nobody needs costs less than waiting for the width
        width = max(1, int(keep.sum(-1).max()))
        ids, scaled, keep = ids[:, :width], scaled[:, :width], keep[:, :width]
    noise = gumbel_noise(*_noise_address(positions, logits.device), ids)
    scores = torch.where(keep, scaled.double() + noise, -torch.inf)
    is_best = scores == scores.amax(-1, keepdim=True)
    return torch.where(is_best, ids, logits.shape[-1] - 1).amin(-1)


def _scale(logits: Tensor, positions: Sequence[SamplingPosition]) -> Tensor:
    """(logits - best) / temperature: the best is 0, so that no temperature can overflow it."""
    temperature = _column(positions, "temperature", logits).clamp_(*_TEMPERATURE_RANGE)
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def _filter(scaled: Tensor, positions: Sequence[SamplingPosition]) -> Tensor:
    """Which ranked candidates survive min_p, then top_k, then top_p: [N, K] bool, a prefix of each row.

    Weights are relative to the best token's, so min_p compares with them as they are; top_p's sum runs over
    what the filters before it left, in float64 from the most likely token down.
    """
    weights = scaled.exp()
    keep = weights >= _column(positions, "min_p", scaled)
    ranks = torch.arange(scaled.shape[-1], device=scaled.device)
    top_k = [min(p.params.top_k, scaled.shape[-1]) if p.params.top_k > 0 else scaled.shape[-1] for p in positions]
    keep &= ranks < to_device(top_k, scaled.device).unsqueeze(-1)
    keep &= scaled > -torch.inf
    reached = prefix_sum(torch.where(keep, weights, 0.0).double())
    before = F.pad(reached[:, :-1], (1, 0))
    top_p = _column(positions, "top_p", reached)
    return keep & ((before < top_p * reached[:, -1:]) | (top_p == 1))


def _noise_address(positions: Sequence[SamplingPosition], device: torch.device) -> tuple[Tensor, ...]:
    """Seeds, choices and absolute positions, each [N] int64."""
    columns = zip(*((p.seed, p.choice, p.position) for p in positions), strict=True)
    return tuple(to_device(list(columns), device, torch.int64))
