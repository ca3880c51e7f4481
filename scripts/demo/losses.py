"""Losses over the large vocabulary, computed in pieces with their gradient at once."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE = 256


class HeadCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of hidden @ head.T without keeping [N, V] float32 logits for the backward pass.

    The targets are token ids [N] or another head's distribution, given as its logits [N, V].
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        """Return the loss; its gradient with respect to hidden and head is computed on the way."""
        num_rows = hidden.shape[0]
        d_hidden, d_head = torch.empty_like(hidden), torch.zeros_like(head, dtype=torch.float32)
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, num_rows, PIECE):
            rows = slice(start, min(start + PIECE, num_rows))
            logits = (hidden[rows] @ head.t()).float()
            normaliser = logits.logsumexp(-1, keepdim=True)
            if targets.dim() == 1:
                ids = targets[rows].unsqueeze(-1)
                total += (normaliser - logits.gather(-1, ids)).sum()
                d_logits = logits.sub_(normaliser).exp_()
                d_logits.scatter_add_(-1, ids, torch.full_like(ids, -1.0, dtype=torch.float32))
            else:
                wanted = targets[rows].float().softmax(-1)
                total += (normaliser.squeeze(-1) - (wanted * logits).sum(-1)).sum()
                d_logits = logits.sub_(normaliser).exp_().sub_(wanted)
            d_logits = d_logits.to(hidden.dtype)
            d_hidden[rows] = d_logits @ head
            d_head += d_logits.t() @ hidden[rows]
        ctx.save_for_backward(d_hidden / num_rows, (d_head / num_rows).to(head.dtype))
        return total / num_rows

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Scale the stored gradients."""
        d_hidden, d_head = ctx.saved_tensors
        return d_hidden * grad, d_head * grad, None


def head_cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean over N rows.

    Args:
        hidden: [N, D], normed.
        head: [V, D], same dtype.
        targets: [N] int64 token ids, or [N, V] logits of the distribution to match.

    Returns:
        Scalar float32, in nats.
    """
    return HeadCrossEntropy.apply(hidden, head, targets)
