"""Streams of rows that do not draft, kept for the MTP block's later keys: a ring per slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from polytempo.cache.view import BatchView
from polytempo.device import to_device


def keep_forward(kept: Tensor, view: BatchView, streams: Tensor) -> None:
    """Copy the streams of a forward's tokens to their cells; twin of the C++ kernel, kernels/streams.h.

    Args:
        kept: [slots, window, hc, D], ring by position.
        view: the forward's tokens, none of them a draft.
        streams: [T, hc, D] of these tokens, in the dtype of `kept`.
    """
    window, packed = kept.shape[1], view.packed
    is_last = np.ones(view.num_tokens, dtype=bool)
    # A later token of the same row takes the cell of one that is a window before it.
    is_last[:-window] = packed.slots[window:] != packed.slots[:-window]
    token_idx = np.flatnonzero(is_last)
    _copy(kept, packed.slots[token_idx] * window + packed.positions[token_idx] % window, token_idx, streams)


def keep_spans(kept: Tensor, spans: Sequence[tuple[int, int, int, int]], streams: Tensor) -> None:
    """Copy the streams of committed tokens of some rows to their cells.

    Args:
        kept: as `keep_forward`.
        spans: per row, no slot twice: its slot, the first position that it fed, the position after its last committed
            one (0 if it starts over: nothing is kept), the place of its first token.
        streams: as `keep_forward`, of all tokens, drafts among them.
    """
    window = kept.shape[1]
    wanted = [
        (slot * window + position % window, token_idx + position - start)
        for slot, start, end, token_idx in spans
        for position in range(max(start, end - window), end)
    ]
    if wanted:
        _copy(kept, *np.array(wanted, dtype=np.int64).T, streams)


def _copy(kept: Tensor, cells: np.ndarray, token_idx: np.ndarray, streams: Tensor) -> None:
    to, source = to_device(np.stack((cells, token_idx)), kept.device)
    kept.flatten(0, 1).index_copy_(0, to, streams[source])
