"""Muon for matrices (batched over experts), AdamW for the rest, one learning-rate schedule for both."""

from __future__ import annotations

import torch
from torch import Tensor

MOMENTUM = 0.95
WEIGHT_DECAY = 0.1
# Source: Jordan et al. 2024, Muon; the quintic that drives singular values towards 1 in five steps.
QUINTIC = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5


def orthogonalise(update: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of update [B, R, C], by Newton-Schulz iterations in bf16."""
    a, b, c = QUINTIC
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.flatten(1).float().norm(dim=1).view(-1, 1, 1).to(x.dtype) + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.transpose(1, 2) if tall else x).float()


def takes_muon(name: str, weight: Tensor) -> bool:
    """Matrices inside blocks; embeddings, heads, routers, stream mixing and vectors go to AdamW."""
    outside = ("embed.", "head.", "gate.weight", "ape", ".fn")
    return weight.dim() >= 2 and not any(part in name for part in outside)


class Optimiser:
    """Steps float32 master weights; `state_dict` makes a run resumable.

    Muon's update is scaled to the root mean square that AdamW's typically has (0.2, Liu et al. 2025,
    arXiv:2502.16982), so that one learning rate serves both.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.muon = {name: weight for name, weight in weights.items() if takes_muon(name, weight)}
        self.momentum = {name: torch.zeros_like(weight) for name, weight in self.muon.items()}
        others = [weight for name, weight in weights.items() if name not in self.muon]
        decayed = [weight for weight in others if weight.dim() >= 2]
        plain = [weight for weight in others if weight.dim() < 2]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply the gradients found on the master weights; weights without one stay as they are."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        for name, weight in self.muon.items():
            if weight.grad is None:
                continue
            momentum = self.momentum[name].lerp_(weight.grad, 1 - MOMENTUM)
            update = weight.grad.lerp(momentum, MOMENTUM)
            matrices = update.unflatten(-2, (2, -1)).flatten(0, 1) if name.endswith("w13") else update
            matrices = matrices.view(-1, *matrices.shape[-2:])
            scale = 0.2 * max(matrices.shape[-2:]) ** 0.5
            weight.mul_(1 - learning_rate * WEIGHT_DECAY)
            weight.sub_(orthogonalise(matrices).view_as(weight), alpha=learning_rate * scale)

    def state_dict(self) -> dict:
        """Everything but the weights."""
        return {"momentum": self.momentum, "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Continue from `state_dict`."""
        for name, momentum in state["momentum"].items():
            self.momentum[name].copy_(momentum)
        self.adamw.load_state_dict(state["adamw"])
