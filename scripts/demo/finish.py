"""The end of a training run: quantise, write the official form, measure it, plot the loss, fill the model card."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from polytempo.checkpoint.export import export_model
from polytempo.checkpoint.load import load_model
from polytempo.model.deepseek_v4 import DeepseekV4

from .card import model_card
from .corpus import Corpus, save_tokenizer
from .evaluate import on_greedy_text, teacher_forced
from .trainer import Trainer
from .weights import DEMO_CONFIG


def finish(trainer: Trainer, corpus: Corpus, out_dir: Path) -> dict[str, float]:
    """Write the model to out_dir and its figures and plot beside it.

    Args:
        trainer: at its last step.
        corpus: for the tokenizer and the held-out files.
        out_dir: becomes the official-format checkpoint; existing files in it are replaced.

    Returns:
        The figures, as written to out_dir/figures.json.
    """
    exact = DeepseekV4(DEMO_CONFIG, torch.float32)
    exact.load_state_dict(trainer.model.state_dict())
    with torch.no_grad():
        for name, weight in exact.named_parameters():
            weight.copy_(trainer.masters.weights[name])
    exact.requires_grad_(False)
    tokenizer_dir = trainer.run_dir / "tokenizer"
    save_tokenizer(corpus.tokenizer, tokenizer_dir)
    export_model(exact, out_dir, to="official", quantise="fp8-fp4", tokenizer_dir=tokenizer_dir, overwrite=True)
    shipped, _ = load_model(out_dir, "float32")
    figures = teacher_forced(shipped, corpus.held_out, corpus.held_out_bytes)
    unquantised = teacher_forced(exact, corpus.held_out, corpus.held_out_bytes)
    figures["nats_per_token_unquantised"] = unquantised["nats_per_token"]
    figures.update(on_greedy_text(out_dir, corpus.held_out_files))
    figures["training_tokens"] = trainer.step * trainer.schedule.batch * trainer.schedule.length
    figures["training_steps"] = trainer.step
    figures = {name: round(value, 4) for name, value in figures.items()}
    (out_dir / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    plot_log(trainer.run_dir / "log.jsonl", out_dir / "loss.png")
    shares = (trainer.schedule.quantise, trainer.schedule.freeze)
    card = model_card(shipped, figures, len(corpus.train), len(corpus.held_out), shares)
    (out_dir / "README.md").write_text(card)
    print(json.dumps(figures, indent=2))
    return figures


def plot_log(log_path: Path, plot_path: Path) -> None:
    """Draw losses and held-out figures over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in log_path.read_text().splitlines()]
    figure, (losses, shares) = plt.subplots(1, 2, figsize=(11, 4))
    for name, label in (("lm", "target, training batch"), ("held_out", "target, held out")):
        points = [(record["step"], record[name]) for record in records if name in record]
        losses.plot(*zip(*points, strict=True), label=label, linewidth=0.8 if name == "lm" else 2)
    losses.set(xlabel="step", ylabel="nats per token", title="Loss")
    for name, label in (("top1", "target's top-1 is the text"), ("agree", "first draft is the target's top-1")):
        points = [(record["step"], record[name]) for record in records if name in record]
        shares.plot(*zip(*points, strict=True), label=label)
    shares.set(xlabel="step", ylabel="share of held-out positions", title="Held-out agreement", ylim=(0, 1))
    for axes in (losses, shares):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(plot_path, dpi=110)
    plt.close(figure)
