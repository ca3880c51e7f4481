"""Manifold-constrained hyper-connections (mHC): how a block reads from and writes to the residual streams.

All of it is float32. Sums over the few streams are written out, so that their order is fixed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from polytempo.config import ModelConfig
from polytempo.model.ops import linear, serial_sum, sigmoid, unweighted_rms_norm


class StreamWeights(NamedTuple):
    """One site's mixing weights for T tokens, float32.

    Attributes:
        pre: [hc, T], how much of each stream enters the block.
        post: [hc, T], how much of the block's output enters each stream.
        comb: [hc, hc, T]; comb[j, k] is how much of old stream j enters new stream k.
    """

    pre: Tensor
    post: Tensor
    comb: Tensor


def _project(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Unweighted RMSNorm over all streams of a token, then the projection `fn`: [rows of fn, T] float32."""
    return linear(unweighted_rms_norm(streams.flatten(1).float(), eps), fn).t().contiguous()


def sinkhorn(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """Normalise columns, then (iterations − 1) times rows and columns; each divisor has eps added.

    Args:
        comb: [hc, hc, T] positive; dim 0 is the old stream, dim 1 the new one.
        iterations: config field `hc_sinkhorn_iters`.
        eps: config field `hc_eps`.

    Returns:
        [hc, hc, T], nearly doubly stochastic.
    """
    comb = comb / (serial_sum(comb, 0) + eps)
    for _ in range(iterations - 1):
        comb = comb / (serial_sum(comb, 1) + eps).unsqueeze(1)
        comb = comb / (serial_sum(comb, 0) + eps)
    return comb


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the streams.

    Args:
        streams: [T, hc, D].
        pre: [hc, T] float32.

    Returns:
        [T, D] in the streams' dtype.
    """
    parts = [share.unsqueeze(-1) * stream for share, stream in zip(pre.unbind(0), streams.unbind(1), strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(streams.dtype)


def expand(streams: Tensor, output: Tensor, weights: StreamWeights) -> Tensor:
    """new[k] = post[k] · output + Σ_j comb[j, k] · old[j].

    Args:
        streams: [T, hc, D], before the block.
        output: [T, D], what the block returned.
        weights: of this site.

    Returns:
        [T, hc, D] in the streams' dtype.
    """
    post = weights.post.t().unsqueeze(-1)
    comb = weights.comb.permute(0, 2, 1).unsqueeze(-1)
    total = post * output.unsqueeze(1)
    for shares, stream in zip(comb.unbind(0), streams.unbind(1), strict=True):
        total = total + shares * stream.unsqueeze(1)
    return total.to(streams.dtype)


class HyperConnection(nn.Module):
    """Mixing weights of one site (attention or feed-forward) of a block.

    Parameters, float32: fn [(2 + hc) · hc, hc · D], base [(2 + hc) · hc], scale [3] (pre, post, comb).
    """

    def __init__(self, config: ModelConfig, device: torch.device | str | None) -> None:
        super().__init__()
        hc = config.hc_mult
        self.hc, self.eps, self.iterations = hc, config.hc_eps, config.hc_sinkhorn_iters
        self.norm_eps = config.rms_norm_eps
        factory = {"dtype": torch.float32, "device": device}
        self.fn = nn.Parameter(torch.empty((2 + hc) * hc, hc * config.hidden_size, **factory))
        self.base = nn.Parameter(torch.empty((2 + hc) * hc, **factory))
        self.scale = nn.Parameter(torch.empty(3, **factory))

    def forward(self, streams: Tensor) -> StreamWeights:
        """Compute the weights from the streams [T, hc, D] themselves."""
        hc = self.hc
        mixes = _project(streams, self.fn, self.norm_eps)
        base = self.base.unsqueeze(-1)
        pre = sigmoid(mixes[:hc] * self.scale[0] + base[:hc]) + self.eps
        post = 2.0 * sigmoid(mixes[hc : 2 * hc] * self.scale[1] + base[hc : 2 * hc])
        comb = (mixes[2 * hc :] * self.scale[2] + base[2 * hc :]).unflatten(0, (hc, hc))
        comb = torch.exp(comb - comb.amax(1, keepdim=True))
        comb = comb / serial_sum(comb, 1).unsqueeze(1) + self.eps
        return StreamWeights(pre, post, sinkhorn(comb, self.iterations, self.eps))


class HyperHead(nn.Module):
    """Collapses the last block's streams before the final norm: σ(·) + eps, without the block's factor 2.

    Parameters, float32: fn [hc, hc · D], base [hc], scale [1].
    """

    def __init__(self, config: ModelConfig, device: torch.device | str | None) -> None:
        super().__init__()
        hc = config.hc_mult
        self.eps, self.norm_eps = config.hc_eps, config.rms_norm_eps
        factory = {"dtype": torch.float32, "device": device}
        self.fn = nn.Parameter(torch.empty(hc, hc * config.hidden_size, **factory))
        self.base = nn.Parameter(torch.empty(hc, **factory))
        self.scale = nn.Parameter(torch.empty(1, **factory))

    def forward(self, streams: Tensor) -> Tensor:
        """Collapse streams [T, hc, D] to [T, D]."""
        mixes = _project(streams, self.fn, self.norm_eps)
        return collapse(streams, sigmoid(mixes * self.scale + self.base.unsqueeze(-1)) + self.eps)
