"""The demo model's training loop: schedule, one step, held-out figures, resuming."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.full_sequence import full_forward, full_mtp_chain
from polytempo.model.rope import RopeTables

from .losses import head_cross_entropy
from .optimiser import Optimiser
from .weights import DEMO_CONFIG, MasterWeights, initialise

MTP_WEIGHT = 0.3
INDEXER_WEIGHT = 0.5
BIAS_SPEED = 1e-3
EVAL_SEQUENCES = 8


@dataclass(frozen=True)
class Schedule:
    """What happens at which share of the run.

    The MTP head first learns tokens, then the target's distribution; the quantisation enters the loop while the
    learning rate falls; at the end the target is frozen and the MTP block alone learns chains of drafts.
    """

    steps: int
    batch: int = 4
    length: int = 512
    peak: float = 2e-3
    soft_mtp: float = 0.45
    decay: float = 0.5
    quantise: float = 0.7
    freeze: float = 0.88

    def learning_rate(self, step: int) -> float:
        """Warm-up, plateau, linear decay; the frozen phase decays once more from half the peak."""
        share = step / self.steps
        if share >= self.freeze:
            return self.peak * 0.5 * max(0.05, (1 - share) / (1 - self.freeze))
        warm = min(1.0, (step + 1) / max(1, 0.02 * self.steps))
        fall = (self.freeze - share) / (self.freeze - self.decay)
        return self.peak * warm * max(0.05, min(1.0, fall))


class Trainer:
    """Owns the model, its masters and the optimiser of one run directory."""

    def __init__(self, schedule: Schedule, tokens: np.ndarray, held_out: np.ndarray, run_dir: Path, seed: int) -> None:
        self.schedule, self.tokens, self.run_dir, self.seed = schedule, tokens, run_dir, seed
        self.model = DeepseekV4(DEMO_CONFIG, torch.bfloat16)
        initialise(self.model, seed)
        self.masters = MasterWeights(self.model)
        self.optimiser = Optimiser(self.masters.weights)
        self.tables = RopeTables.build(DEMO_CONFIG, schedule.length)
        self.step = 0
        generator = np.random.default_rng(0)
        self.eval_ids = self._windows(held_out, generator, EVAL_SEQUENCES)
        self.counts: dict[str, Tensor] = {}
        for name, module in self.model.named_modules():
            if name.endswith("ffn.gate") and not module.is_hash:
                module.bias.requires_grad_(False)
                module.register_forward_hook(self._count(name))

    def _count(self, name: str):
        def hook(module, args, output) -> None:
            self.counts[name] = output[0].flatten().bincount(minlength=DEMO_CONFIG.n_routed_experts)

        return hook

    def _windows(self, tokens: np.ndarray, generator: np.random.Generator, num: int) -> Tensor:
        starts = generator.integers(0, len(tokens) - self.schedule.length, num)
        rows = [tokens[start : start + self.schedule.length].astype(np.int64) for start in starts]
        return torch.from_numpy(np.stack(rows))

    @property
    def frozen(self) -> bool:
        """Whether only the MTP block still learns."""
        return self.step >= self.schedule.freeze * self.schedule.steps

    def train_step(self) -> dict[str, float]:
        """One optimiser step on one batch; returns its losses."""
        share = self.step / self.schedule.steps
        self.masters.quantised = share >= self.schedule.quantise
        self.masters.publish()
        batch = self._windows(self.tokens, np.random.default_rng((self.seed, self.step)), self.schedule.batch)
        losses = self._mtp_only(batch) if self.frozen else self._joint(batch, share >= self.schedule.soft_mtp)
        sum(losses.values()).backward()
        self.masters.collect_gradients()
        grads = [weight for weight in self.masters.weights.values() if weight.grad is not None]
        torch.nn.utils.clip_grad_norm_(grads, 1.0, foreach=True)
        self.optimiser.step(self.schedule.learning_rate(self.step))
        self._balance()
        self.step += 1
        return {name: loss.item() for name, loss in losses.items()}

    def _joint(self, ids: Tensor, soft_mtp: bool) -> dict[str, Tensor]:
        model, head = self.model, self.model.head.weight
        output = full_forward(model, ids, self.tables, with_indexer_loss=True)
        hidden = model.norm(model.hc_head(output.streams[:, :-1].flatten(0, 1)))
        chain = full_mtp_chain(model, output.streams, ids, self.tables, depth=1)
        block = model.mtp[0]
        drafted = block.norm(block.hc_head(chain[0][:, :-1].flatten(0, 1)))
        if soft_mtp:
            with torch.no_grad():
                targets = hidden.unflatten(0, (len(ids), -1))[:, 1:].flatten(0, 1) @ head.t()
        else:
            targets = ids[:, 2:].flatten()
        return {
            "lm": head_cross_entropy(hidden, head, ids[:, 1:].flatten()),
            "mtp": MTP_WEIGHT * head_cross_entropy(drafted, head, targets),
            "indexer": INDEXER_WEIGHT * sum(output.indexer_losses),
        }

    def _mtp_only(self, ids: Tensor, depth: int = 3) -> dict[str, Tensor]:
        model, head = self.model, self.model.head.weight
        for name, weight in model.named_parameters():
            weight.requires_grad_(name.startswith("mtp.") and not name.endswith("gate.bias"))
        with torch.no_grad():
            output = full_forward(model, ids, self.tables)
            hidden = model.norm(model.hc_head(output.streams.flatten(0, 1))).unflatten(0, ids.shape)
        block = model.mtp[0]
        losses = {}
        for draft_idx, streams in enumerate(full_mtp_chain(model, output.streams, ids, self.tables, depth)):
            drafted = block.norm(block.hc_head(streams.flatten(0, 1)))
            # Draft d from position p stands for the token at p + d + 1, whose law the target gives at p + d.
            targets = hidden[:, draft_idx + 1 :].flatten(0, 1) @ head.t()
            losses[f"mtp_{draft_idx + 1}"] = 0.5**draft_idx * head_cross_entropy(drafted, head.detach(), targets)
        return losses

    @torch.no_grad()
    def _balance(self) -> None:
        """Aux-loss-free balancing (arXiv:2408.15664): busy experts lose bias, idle ones gain it."""
        for name, counts in self.counts.items():
            if not self.frozen or name.startswith("mtp."):
                bias = self.masters.weights[f"{name}.bias"]
                bias += BIAS_SPEED * (counts.float().mean() - counts).sign()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Held-out figures on a few fixed windows: nats per token, top-1, agreement of draft 1, load balance."""
        model = self.model
        batches = self.eval_ids.split(self.schedule.batch)
        streams = torch.cat([full_forward(model, ids, self.tables).streams for ids in batches])
        logits = model.logits(streams.flatten(0, 1)).float().unflatten(0, self.eval_ids.shape)
        drafted = full_mtp_chain(model, streams, self.eval_ids, self.tables, depth=1)[0]
        draft_ids = model.mtp_logits(drafted.flatten(0, 1)).argmax(-1).unflatten(0, drafted.shape[:2])
        target_ids, truth = logits.argmax(-1), self.eval_ids
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), truth[:, 1:].flatten())
        busiest = max(float(c.max() / c.float().mean()) for c in self.counts.values())
        return {
            "held_out": loss.item(),
            "top1": (target_ids[:, :-1] == truth[:, 1:]).float().mean().item(),
            "agree": (draft_ids == target_ids[:, 1:]).float().mean().item(),
            "busiest_expert": busiest,
        }

    def save(self) -> None:
        """Write the resumable state; the old one stays until the new one is complete."""
        state = {"step": self.step, "masters": self.masters.weights, "optimiser": self.optimiser.state_dict()}
        scratch = self.run_dir / "state.pt.new"
        torch.save(state, scratch)
        scratch.replace(self.run_dir / "state.pt")

    def resume(self) -> bool:
        """Load the state that `save` wrote, if there is one."""
        path = self.run_dir / "state.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        self.step = state["step"]
        with torch.no_grad():
            for name, weight in self.masters.weights.items():
                weight.copy_(state["masters"][name])
        self.optimiser.load_state_dict(state["optimiser"])
        return True

    def log(self, record: dict) -> None:
        """Append one line to log.jsonl."""
        with (self.run_dir / "log.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.step, "time": round(time.time(), 1), **record}) + "\n")
