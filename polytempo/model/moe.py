"""Mixture of experts: learned top-k or token-id routing, routed experts, one shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polytempo import gpu
from polytempo.config import ModelConfig
from polytempo.model.ops import Linear, linear, serial_sum, sqrt_softplus, swiglu, top_ids, uses_triton


class Gate(nn.Module):
    """Chooses and weighs the experts of each token.

    weight [E, D] float32; score-routed layers have bias [E] float32, which takes part in the choice only;
    hash layers have tid2eid [vocab, top_k] int64, the experts of each token id.
    """

    def __init__(self, config: ModelConfig, is_hash: bool, device: torch.device | str | None) -> None:
        super().__init__()
        self.top_k, self.route_scale = config.num_experts_per_tok, config.routed_scaling_factor
        num_experts = config.n_routed_experts
        factory = {"dtype": torch.float32, "device": device}
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size, **factory))
        if is_hash:
            table = torch.zeros(config.vocab_size, self.top_k, dtype=torch.int64, device=device)
            self.register_buffer("tid2eid", table)
        else:
            self.bias = nn.Parameter(torch.zeros(num_experts, **factory))

    @property
    def is_hash(self) -> bool:
        """Whether the token id alone decides the experts."""
        return "tid2eid" in self._buffers

    def forward(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Route T tokens.

        Args:
            x: [T, D].
            token_ids: [T] int64.

        Returns:
            expert_ids [T, top_k] int64 and their weights [T, top_k] float32, which sum to the routed scale.
        """
        scores = sqrt_softplus(linear(x.float(), self.weight))
        if self.is_hash:
            expert_ids = self.tid2eid[token_ids]
        else:
            expert_ids = top_ids(scores + self.bias, self.top_k)
        weights = scores.gather(-1, expert_ids)
        # The 1e-20 is transformers' guard against a token whose scores are all 0.
        total = serial_sum(weights, 1).unsqueeze(-1) + 1e-20
        return expert_ids, weights / total * self.route_scale


class Experts(nn.Module):
    """Routed experts, stacked: w13 [E, 2·I, D] (gate rows, then up rows) and w2 [E, D, I]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        num_experts, inner, width = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.limit = config.swiglu_limit
        self.w13 = nn.Parameter(torch.empty(num_experts, 2 * inner, width, dtype=dtype, device=device))
        self.w2 = nn.Parameter(torch.empty(num_experts, width, inner, dtype=dtype, device=device))

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of each token's experts.

        A token's outputs are added in the order of its own expert list, whoever else chose the same experts.

        Args:
            x: [T, D].
            expert_ids: [T, top_k] int64.
            weights: [T, top_k] float32.

        Returns:
            [T, D] float32.
        """
        if uses_triton(x) and isinstance(self.w13, Tensor):
            by_choice = gpu.expert_outputs(x, expert_ids, self.w13, self.w2, self.limit)
        else:
            by_choice = self._outputs(x, expert_ids)
        return serial_sum(by_choice.float() * weights.unsqueeze(-1), 1)

    def _outputs(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        """[T, top_k, D]: tokens are sorted by expert, and each chosen expert runs once over its own tokens."""
        if not len(x):
            return x.new_empty(*expert_ids.shape, x.shape[1])
        order = expert_ids.flatten().argsort(stable=True)
        counts = expert_ids.flatten().bincount(minlength=len(self.w13)).tolist()
        groups = x[order // expert_ids.shape[1]].split(counts)
        outputs = [
            self._expert(group, self.w13[expert], self.w2[expert])
            for expert, group in enumerate(groups)
            if group.shape[0]
        ]
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        return torch.cat(outputs)[place].unflatten(0, expert_ids.shape)

    def _expert(self, x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        gate, up = linear(x, w13).chunk(2, dim=-1)
        return linear(swiglu(gate, up, self.limit).to(x.dtype), w2)


class SharedExpert(nn.Module):
    """The expert that every token takes; w1 gate, w3 up, w2 down."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.moe_intermediate_size * config.n_shared_experts
        self.limit = config.swiglu_limit
        self.w1 = Linear(width, inner, dtype, device)
        self.w2 = Linear(inner, width, dtype, device)
        self.w3 = Linear(width, inner, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [T, D] to [T, D]."""
        return self.w2(swiglu(self.w1(x), self.w3(x), self.limit).to(x.dtype))


class MoE(nn.Module):
    """The feed-forward half of a block."""

    def __init__(
        self, config: ModelConfig, is_hash: bool, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.gate = Gate(config, is_hash, device)
        self.experts = Experts(config, dtype, device)
        self.shared_experts = SharedExpert(config, dtype, device)

    def forward(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """Map x [T, D] of the tokens token_ids [T] to [T, D] in x's dtype."""
        routed = self.experts(x, *self.gate(x, token_ids))
        return (routed + self.shared_experts(x).float()).to(x.dtype)
