"""The demo model's card, filled with the figures of the run that made it."""

from __future__ import annotations

from polytempo.model.deepseek_v4 import DeepseekV4

CARD = """# The polytempo demo model

A small language model of the DeepSeek-V4 architecture, in the official checkpoint form. It exists to exercise every part of
the family for real: window, ratio-4 and ratio-128 attention with an indexer that must choose, hash- and score-routed experts,
hyper-connections, an MTP block, fp8 and packed fp4 weights. It continues Python source code, poorly. It knows no facts,
cannot hold a conversation (its chat template only shows that chat works), and is fit for no use but demonstration and tests.

## Shape
{parameters:,} parameters; hidden {hidden_size}, {num_layers} layers with ratios {ratios}, {heads} heads of {head_dim}, window {window},
index_topk {index_topk}, {experts} routed experts of {expert_width} (top {top_k}) and one shared, {streams} streams, one MTP block, vocabulary
{vocab} (byte-level BPE trained with it).

## Training
Text: the source of the Python standard library of the interpreter that ran the script (Python Software Foundation License,
copyright the Python Software Foundation), without tests, encodings and generated tables: {train_tokens:,} tokens; about 5 % of the files, chosen by
a hash of their text, are held out ({held_out_tokens:,} tokens). `scripts/train_demo.py` did all of it in {steps:,} steps of 2,048 tokens
({trained_tokens:,} in all), sequences of 512: Muon and AdamW; losses for the next token, for the MTP block, and the KL
divergence from attention mass to index scores; router bias by the aux-loss-free update; from {quantise:.0%} of the steps on with the
quantisation in the loop; from {freeze:.0%} on the target frozen and the MTP block alone learning the target's law, three drafts deep.
The loss curve is `loss.png`.

## Figures on held-out files
Windows of 512 tokens, each from an empty context; as shipped (quantised), in float32.

| figure | value |
|---|---|
| loss | {nats_per_token} nats per token ({nats_per_token_unquantised} before quantisation) |
| bits per byte | {bits_per_byte} |
| target's top-1 is the text | {target_top1} |

| | draft 1 | draft 2 | draft 3 |
|---|---|---|---|
| draft is the text | {draft_top1_1} | {draft_top1_2} | {draft_top1_3} |
| draft is the target's own top-1, teacher-forced | {agreement_1} | {agreement_2} | {agreement_3} |
| this draft and all before it are | {chain_1} | {chain_2} | {chain_3} |
| draft is the target's top-1, along greedy continuations | {greedy_agreement_1} | {greedy_agreement_2} | {greedy_agreement_3} |

Licence of the weights: Apache-2.0, with the notice above for the training text.
"""


def model_card(
    model: DeepseekV4, figures: dict[str, float], train_tokens: int, held_out_tokens: int, shares: tuple[float, float]
) -> str:
    """Fill the card.

    Args:
        model: as shipped.
        figures: as `finish` measured them.
        train_tokens: tokens of the training files.
        held_out_tokens: tokens of the held-out files.
        shares: of the steps, where quantisation entered and where the target was frozen.

    Returns:
        Markdown.
    """
    config = model.config
    return CARD.format(
        parameters=sum(weight.numel() for weight in model.parameters()),
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        ratios=", ".join(map(str, config.compress_ratios)),
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
        window=config.sliding_window,
        index_topk=config.index_topk,
        experts=config.n_routed_experts,
        expert_width=config.moe_intermediate_size,
        top_k=config.num_experts_per_tok,
        streams=config.hc_mult,
        vocab=config.vocab_size,
        train_tokens=train_tokens,
        held_out_tokens=held_out_tokens,
        steps=int(figures["training_steps"]),
        trained_tokens=int(figures["training_tokens"]),
        quantise=shares[0],
        freeze=shares[1],
        **{name: value for name, value in figures.items() if not name.startswith("training_")},
    )
