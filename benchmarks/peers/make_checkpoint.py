"""Write one random checkpoint in every form that an engine reads: DIR/official, DIR/hf, and DIR/bf16.

    python benchmarks/peers/make_checkpoint.py DIR

Hidden 512, 8 layers, 8 heads of 512, 64 experts of 256, top 6, vocabulary 4,096: small enough for two cores, and in the
family's shape. bf16 has the official names, and weights that are not quantised. A form that is there already stays.
Random weights say nothing about acceptance; the demo model is for that.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from polytempo.checkpoint import export_model
from polytempo.config import ModelConfig
from polytempo.model.deepseek_v4 import DeepseekV4

CONFIG = {
    "vocab_size": 4096, "hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 8,
    "num_attention_heads": 8, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 256, "o_groups": 2,
    "o_lora_rank": 256, "n_routed_experts": 64, "num_experts_per_tok": 6, "index_n_heads": 8,
    "index_head_dim": 128, "index_topk": 512, "sliding_window": 128, "hc_mult": 4, "num_hash_layers": 1,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 0, 0], "num_nextn_predict_layers": 1,
    "max_position_embeddings": 131072,
}  # fmt: skip
FORMS = {"official": {"quantise": "fp8-fp4"}, "hf": {"to": "huggingface"}, "bf16": {}}


def random_weights() -> DeepseekV4:
    """The model, the same every time."""
    torch.manual_seed(0)
    model = DeepseekV4(ModelConfig.from_dict(CONFIG), torch.bfloat16, "cpu").requires_grad_(False)
    for name, value in model.state_dict().items():
        if name.endswith("norm.weight"):
            value.fill_(1.0)
        elif name.endswith("tid2eid"):
            for row in value:
                row.copy_(torch.randperm(CONFIG["n_routed_experts"])[: value.shape[1]])
        elif value.is_floating_point():
            value.normal_(std=0.02)
    return model.eval()


def main() -> None:
    """Make the weights once, export them in every form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder, model = parser.parse_args().folder, random_weights()
    folder.mkdir(parents=True, exist_ok=True)
    for form, how in FORMS.items():
        if not (folder / form).exists():
            export_model(model, folder / form, **how)
            print(f"wrote {folder / form}")


if __name__ == "__main__":
    main()
