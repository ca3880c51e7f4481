"""Train the demo model from nothing: tokenizer, target, indexer and MTP block, then quantise and write it.

    python scripts/train_demo.py --run-dir runs/demo --out polytempo/demo_model

Interrupt it at will: it continues from the last saved state in --run-dir.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo.compiled import install
from demo.corpus import build_corpus, save_tokenizer
from demo.finish import finish
from demo.trainer import Schedule, Trainer
from demo.weights import DEMO_CONFIG

SAVE_EVERY_SECONDS = 480
EVAL_EVERY_STEPS = 100


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"), help="state, log and loss curve")
    parser.add_argument("--out", type=Path, default=Path("runs/demo/model"), help="where the model goes")
    parser.add_argument("--steps", type=int, default=1250, help="optimiser steps of 2,048 tokens")
    parser.add_argument("--seed", type=int, default=0, help="weights, expert table and batches")
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: all cores)")
    parser.add_argument("--no-compile", action="store_true", help="skip torch.compile (a quarter slower per step)")
    parser.add_argument("--finish-only", action="store_true", help="quantise, measure and write what is in --run-dir")
    parser.add_argument("--max-seconds", type=float, default=None, help="save and stop after this long")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if not args.no_compile and not args.finish_only:
        install()
    args.run_dir.mkdir(parents=True, exist_ok=True)
    corpus = build_corpus(DEMO_CONFIG.vocab_size)
    save_tokenizer(corpus.tokenizer, args.run_dir / "tokenizer")
    print(f"corpus: {len(corpus.train):,} training tokens, {len(corpus.held_out):,} held out")
    trainer = Trainer(Schedule(args.steps), corpus.train, corpus.held_out, args.run_dir, args.seed)
    if trainer.resume():
        print(f"resumed at step {trainer.step}")
    if args.finish_only:
        finish(trainer, corpus, args.out)
    elif train(trainer, args.max_seconds):
        # A process of its own: what is measured must run the package as it is, not the compiled parts above.
        subprocess.run([sys.executable, *sys.argv, "--finish-only"], check=True)


def train(trainer: Trainer, max_seconds: float | None) -> bool:
    """Run to the last step, or until `max_seconds` have passed; returns whether the run is complete."""
    started = last_save = time.monotonic()
    total = trainer.schedule.steps
    with tqdm(total=total, initial=trainer.step, unit="step", mininterval=10) as bar:
        while trainer.step < total:
            losses = trainer.train_step()
            bar.update()
            bar.set_postfix({name: f"{loss:.3f}" for name, loss in losses.items()})
            record = {name: round(loss, 4) for name, loss in losses.items()}
            if trainer.step % EVAL_EVERY_STEPS == 0 or trainer.step == total:
                record.update({name: round(figure, 4) for name, figure in trainer.evaluate().items()})
            trainer.log(record)
            now = time.monotonic()
            timed_out = max_seconds is not None and now - started > max_seconds
            if now - last_save > SAVE_EVERY_SECONDS or timed_out or trainer.step == total:
                trainer.save()
                last_save = now
            if timed_out:
                return trainer.step >= total
    return True


if __name__ == "__main__":
    main()
