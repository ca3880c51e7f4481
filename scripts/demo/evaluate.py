"""Held-out figures of a demo model: loss, bits per byte, and how well each draft foresees target and text."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.full_sequence import full_forward, full_mtp_chain
from polytempo.model.rope import RopeTables

DEPTH = 3


@torch.inference_mode()
def teacher_forced(model: DeepseekV4, held_out: np.ndarray, held_out_bytes: int, length: int = 512) -> dict[str, float]:
    """Score every held-out window once.

    Args:
        model: weights as shipped.
        held_out: all held-out tokens in one stream.
        held_out_bytes: UTF-8 bytes that they spell.
        length: tokens per window; each window starts with an empty context.

    Returns:
        Nats per token, bits per byte, top-1 accuracies, and each draft's agreement with the target's own top-1.
    """
    windows = len(held_out) // length
    stream = torch.from_numpy(held_out[: windows * length].astype(np.int64)).view(windows, length)
    tables = RopeTables.build(model.config, length)
    sums = {"nats": 0.0, "tokens": 0, "top1": 0}
    hits = {f"{kind}_{d}": 0 for d in range(1, DEPTH + 1) for kind in ("draft_top1", "agreement", "chain")}
    counts = {d: 0 for d in range(1, DEPTH + 1)}
    for ids in tqdm(stream.split(4), desc="held out", unit="batch", mininterval=10):
        streams = full_forward(model, ids, tables).streams
        logits = model.logits(streams.flatten(0, 1)).float().unflatten(0, ids.shape)
        target_ids = logits.argmax(-1)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        sums["nats"] += loss.item()
        sums["tokens"] += ids[:, 1:].numel()
        sums["top1"] += (target_ids[:, :-1] == ids[:, 1:]).sum().item()
        all_right = None
        for draft, chained in enumerate(full_mtp_chain(model, streams, ids, tables, DEPTH), start=1):
            drafted = model.mtp_logits(chained.flatten(0, 1)).argmax(-1).unflatten(0, chained.shape[:2])
            agrees = drafted == target_ids[:, draft:]
            all_right = agrees if all_right is None else all_right[:, : agrees.shape[1]] & agrees
            counts[draft] += agrees.numel()
            hits[f"agreement_{draft}"] += agrees.sum().item()
            hits[f"chain_{draft}"] += all_right.sum().item()
            truth = ids[:, draft + 1 :]
            hits[f"draft_top1_{draft}"] += (drafted[:, : truth.shape[1]] == truth).sum().item()
    nats = sums["nats"] / sums["tokens"]
    bytes_per_token = held_out_bytes / len(held_out)
    figures = {"nats_per_token": nats, "bits_per_byte": nats / math.log(2) / bytes_per_token}
    figures["target_top1"] = sums["top1"] / sums["tokens"]
    for name, value in hits.items():
        figures[name] = value / counts[int(name[-1])]
    return figures


@torch.inference_mode()
def on_greedy_text(model_dir: Path, files: list[list[int]], num: int = 32, prompt: int = 128, new: int = 128) -> dict:
    """Agreement of the drafts with the target along the target's own greedy continuations of held-out files."""
    from polytempo import LLM, SamplingParams

    llm = LLM(model_dir, dtype="float32", max_rows=num, max_model_len=prompt + new)
    prompts = [ids[:prompt] for ids in files if len(ids) > prompt][:num]
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    tables = RopeTables.build(llm.model.config, prompt + new)
    hits, totals = [0] * DEPTH, [0] * DEPTH
    for output in outputs:
        ids = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])
        streams = full_forward(llm.model, ids, tables).streams
        target_ids = llm.model.logits(streams[0]).argmax(-1)
        for draft, chained in enumerate(full_mtp_chain(llm.model, streams, ids, tables, DEPTH)):
            drafted = llm.model.mtp_logits(chained[0]).argmax(-1)
            agrees = (drafted == target_ids[draft + 1 :])[prompt - 1 :]
            hits[draft] += agrees.sum().item()
            totals[draft] += agrees.numel()
    return {f"greedy_agreement_{d + 1}": hits[d] / totals[d] for d in range(DEPTH)}
