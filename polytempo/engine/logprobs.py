"""Raw log-probabilities and ranks; the one place that says how equal logits are ordered: lowest id first.

Works on the model's own logits, before any option of a request. Each row's result is a function of that row
alone, bit for bit, so the only inexact reduction here, the sum of exponentials, is written as a fixed tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from polytempo.errors import InvariantError
from polytempo.model.ops import tree_sum
from polytempo.types import Logprob

_ID_MASK = 0xFFFFFFFF


def first_argmax(x: Tensor) -> Tensor:
    """Index of each row's highest value, the lowest index among equals.

    torch.argmax promises no particular one of several equal maxima; numpy's promises the first, and takes one pass.

    Args:
        x: [N, V], any float dtype.

    Returns:
        [N] int64; for a row that holds NaN, any.
    """
    if x.device.type == "cpu":
        floats = x if x.dtype == torch.float64 else x.float()
        return torch.from_numpy(floats.detach().numpy().argmax(-1))
    return _first_argmax_anywhere(x)


def _first_argmax_anywhere(x: Tensor) -> Tensor:
    """The same on any device."""
    width = x.shape[-1]
    ids = torch.arange(width, dtype=torch.int32, device=x.device)
    is_best = x == x.amax(-1, keepdim=True)
    return torch.where(is_best, ids, width - 1).amin(-1).long()


def ranked_ids(x: Tensor, count: int) -> Tensor:
    """Ids of each row's `count` highest values in descending order, equals by ascending id.

    torch.topk breaks ties as it likes (on the CPU by the number of columns), so value and id are packed into
    one integer key without equals: the float's bits in an order-preserving form above the complemented id.

    Args:
        x: [N, V] float32; NaN sorts anywhere.
        count: 0..V.

    Returns:
        [N, count] int64.
    """
    bits = (x + 0.0).view(torch.int32)  # + 0.0 turns -0.0, whose bits differ, into the 0.0 that it equals
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(x.shape[-1], device=x.device)
    keys = (ordered.long() << 32) | (_ID_MASK - ids)
    if count < x.shape[-1]:
        best = keys.topk(count, dim=-1).values
    else:
        best = keys.sort(dim=-1, descending=True).values
    return _ID_MASK - (best & _ID_MASK)


def log_normaliser(logits: Tensor) -> Tensor:
    """log Σ exp(logits) per row, summed in an order that depends on V alone.

    Args:
        logits: [N, V] float32.

    Returns:
        [N] float64.
    """
    best = logits.amax(-1, keepdim=True)
    weights = (logits - best).double().exp()
    missing = (1 << (logits.shape[-1] - 1).bit_length()) - logits.shape[-1]
    return best.squeeze(-1).double() + tree_sum(F.pad(weights, (0, missing)), dim=1).log()


def gather_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    num_logprobs: int | Sequence[int],
    decode: Callable[[int], str] | None = None,
) -> list[dict[int, Logprob]]:
    """Log-probabilities of the chosen and of the most likely tokens under the model's unprocessed logits.

    Args:
        logits: [N, V], any float dtype; finite or -inf.
        token_ids: [N] int64, the chosen tokens.
        num_logprobs: how many top tokens besides, for all rows or per row; 0 gives the chosen token alone.
        decode: token id -> text for `Logprob.decoded_token`; None leaves it None.

    Returns:
        One dict per row, the chosen token first, then the top tokens by rank; a chosen token among them is
        not repeated. Ranks count from 1 and are those of the whole vocabulary.

    Raises:
        InvariantError: the sizes disagree, or more top tokens are asked for than V.
    """
    num_rows, vocab_size = logits.shape
    wanted = [num_logprobs] * num_rows if isinstance(num_logprobs, int) else list(num_logprobs)
    if token_ids.shape != (num_rows,) or len(wanted) != num_rows or max(wanted, default=0) > vocab_size:
        raise InvariantError(
            f"gather_logprobs: logits {tuple(logits.shape)}, token_ids {tuple(token_ids.shape)}, "
            f"num_logprobs for {len(wanted)} rows, at most {max(wanted, default=0)}"
        )
    if num_rows == 0:
        return []
    logits = logits.float()
    chosen = token_ids.unsqueeze(-1)
    value = logits.gather(-1, chosen)
    ids = torch.arange(vocab_size, device=logits.device)
    is_ahead = (logits > value) | ((logits == value) & (ids < chosen))
    chosen_ranks = is_ahead.sum(-1, keepdim=True) + 1
    top = ranked_ids(logits, max(wanted))
    both = torch.cat([chosen, top], dim=-1)
    values = (logits.gather(-1, both).double() - log_normaliser(logits).unsqueeze(-1)).float()
    # Ranks, ids and values in one copy to the host, for which the device is waited for: float64 holds all exactly.
    width = both.shape[1]
    rows = torch.cat([chosen_ranks.double(), both.double(), values.double()], dim=-1).tolist()
    return [
        _one_row([int(token_id) for token_id in row[1 : count + 2]], row[1 + width :], int(row[0]), decode)
        for row, count in zip(rows, wanted, strict=True)
    ]


def _one_row(
    ids: list[int], values: list[float], chosen_rank: int, decode: Callable[[int], str] | None
) -> dict[int, Logprob]:
    """The dict of one position from its ids (chosen first, then by rank) and their log-probabilities."""
    row: dict[int, Logprob] = {}
    for column, token_id in enumerate(ids):
        if token_id not in row:
            text = None if decode is None else decode(token_id)
            row[token_id] = Logprob(values[column], column or chosen_rank, text)
    return row
