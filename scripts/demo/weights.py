"""The demo model's shape, its initial weights, and its float32 master copy while it trains."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polytempo.config import ModelConfig, RopeConfig
from polytempo.model.deepseek_v4 import DeepseekV4

DEMO_CONFIG = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    moe_intermediate_size=128,
    num_hidden_layers=5,
    num_attention_heads=4,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=128,
    n_routed_experts=64,
    num_experts_per_tok=6,
    compress_ratios=(0, 0, 4, 128, 4),
    rope=RopeConfig(theta=10000.0),
    compress_rope=RopeConfig(theta=160000.0, factor=4.0, original_max_position_embeddings=4096),
    num_hash_layers=1,
    index_n_heads=4,
    index_head_dim=128,
    index_topk=64,
    hc_mult=4,
    max_position_embeddings=16384,
    bos_token_id=0,
    eos_token_ids=(1,),
    expert_dtype="fp4",
)


def balanced_table(config: ModelConfig, generator: torch.Generator) -> Tensor:
    """Token id -> experts [vocab, top_k], every expert named equally often (to within one), none twice a row."""
    num_experts, top_k = config.n_routed_experts, config.num_experts_per_tok
    rows: list[Tensor] = []
    while len(rows) < config.vocab_size:
        shuffled = torch.randperm(num_experts, generator=generator)
        usable = num_experts // top_k * top_k
        # Rotating the permutation lets each of its experts fall into the dropped tail equally often.
        shuffled = shuffled.roll(len(rows) % num_experts)[:usable]
        rows.extend(shuffled.view(-1, top_k))
    return torch.stack(rows[: config.vocab_size])


def initialise(model: DeepseekV4, seed: int) -> None:
    """Fill all weights from one seed.

    Projections get variance 1 / fan_in, those that write to the streams less with depth. Each site starts by
    reading mostly one stream and writing all of them, so that the streams differ from the first step.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    hc, num_sites = config.hc_mult, 2 * (config.num_hidden_layers + config.num_mtp_blocks)
    site = 0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("embed.weight"):
                weight.copy_(noise * 0.5)
            elif name.endswith(("norm.weight", "gate.bias", "attn_sink")):
                weight.copy_(torch.full_like(noise, 1.0 if name.endswith("norm.weight") else 0.0))
            elif name.endswith(".scale"):
                weight.fill_(0.1)
            elif name.endswith(".base"):
                if weight.numel() == hc:
                    weight.fill_(math.log(1 / (hc - 1)))
                else:
                    weight.copy_(_site_base(hc, site))
                    site += 1
            elif name.endswith("ape"):
                weight.copy_(noise * 0.02)
            else:
                fan_in = weight.shape[-1]
                depth = math.sqrt(num_sites) if name.endswith(("wo_b.weight", "w2", "w2.weight")) else 1.0
                weight.copy_(noise / math.sqrt(fan_in) / depth)
        for layer in model.layers:
            if layer.ffn.gate.is_hash:
                layer.ffn.gate.tid2eid.copy_(balanced_table(config, generator))


def _site_base(hc: int, site: int) -> Tensor:
    pre = torch.full((hc,), -2.5)
    pre[site % hc] = 1.5
    comb = torch.eye(hc) * 4.0
    return torch.cat((pre, torch.zeros(hc), comb.flatten()))


def is_expert(name: str) -> bool:
    """Whether the official format stores this weight as fp4."""
    return ".experts." in name and "shared" not in name


def is_fp8(name: str) -> bool:
    """Whether the official format stores this weight as fp8."""
    ends = ("wq_a.weight", "wq_b.weight", "attn.wkv.weight", "wo_a.weight", "wo_b.weight", "e_proj.weight")
    return name.endswith((*ends, "h_proj.weight")) or "shared_experts" in name


class MasterWeights:
    """float32 copies that the optimiser steps; the model computes with their bf16 (or quantised) image.

    With `quantised` set, the image is what the shipped file will hold, so the loss sees the quantisation and
    gradients pass straight through it.
    """

    def __init__(self, model: DeepseekV4) -> None:
        self.model = model
        self.weights = {name: weight.detach().float().clone() for name, weight in model.named_parameters()}
        self.quantised = False

    def collect_gradients(self) -> None:
        """Move the model's gradients onto the masters."""
        for name, weight in self.model.named_parameters():
            self.weights[name].grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Write the masters' image into the model."""
        for name, weight in self.model.named_parameters():
            weight.copy_(self.image(name))

    def image(self, name: str) -> Tensor:
        """What the shipped file would hold of one weight, as float32."""
        master = self.weights[name]
        if not self.quantised:
            return master
        from polytempo.checkpoint.quant import fake_quantise_fp4, fake_quantise_fp8

        if is_expert(name):
            return fake_quantise_fp4(master)
        return fake_quantise_fp8(master) if is_fp8(name) else master
