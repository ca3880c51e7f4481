"""A model's configuration: frozen, validated, torch-free. The only reader of config.json and environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polytempo.config_fields import LAYER_TYPE_RATIO, RopeConfig, read_fields, require_integer
from polytempo.errors import CheckpointError, ConfigError

__all__ = ["LAYER_TYPE_RATIO", "RATIOS", "SCORING_FUNCS", "ModelConfig", "RopeConfig", "cache_dir", "read_json"]

RATIOS = (0, 4, 128)
SCORING_FUNCS = ("sqrtsoftplus",)


@dataclass(frozen=True)
class ModelConfig:
    """Shape of one DeepSeek-V4 model; field names are those of the public config.json.

    `compress_ratios` holds one entry per decoder layer and `mtp_compress_ratios` one per MTP block;
    `num_hash_layers` counts the leading layers whose experts come from a table by token id.
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    num_experts_per_tok: int
    compress_ratios: tuple[int, ...]
    rope: RopeConfig
    compress_rope: RopeConfig
    n_shared_experts: int = 1
    num_hash_layers: int = 0
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    sliding_window: int = 128
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    scoring_func: str = "sqrtsoftplus"
    norm_topk_prob: bool = True
    num_nextn_predict_layers: int = 1
    mtp_compress_ratios: tuple[int, ...] = (0,)
    max_position_embeddings: int = 4096
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    expert_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE_FIELDS:
            require_integer(name, getattr(self, name), at_least=1)
        for name in ("num_hash_layers", "num_nextn_predict_layers"):
            require_integer(name, getattr(self, name), at_least=0)
        if len(self.compress_ratios) != self.num_hidden_layers:
            raise ConfigError(
                f"config field 'compress_ratios' has {len(self.compress_ratios)} entries for "
                f"{self.num_hidden_layers} layers ('num_hidden_layers'); it needs one per layer"
            )
        for layer_idx, ratio in enumerate(self.compress_ratios):
            if not isinstance(ratio, int) or ratio not in RATIOS:
                raise ConfigError(
                    f"config field 'compress_ratios' entry {layer_idx} is {ratio!r}; known ratios: {RATIOS}"
                )
        if len(self.mtp_compress_ratios) != self.num_nextn_predict_layers:
            raise ConfigError(
                f"'mtp_compress_ratios' has {len(self.mtp_compress_ratios)} entries for "
                f"{self.num_nextn_predict_layers} MTP blocks ('num_nextn_predict_layers')"
            )
        for block_idx, ratio in enumerate(self.mtp_compress_ratios):
            if ratio != 0:
                raise ConfigError(
                    f"config field 'compress_ratios' gives MTP block {block_idx} the ratio {ratio!r}; "
                    "MTP blocks attend over the window only, so their entry must be 0"
                )
        if self.num_nextn_predict_layers > 1:
            raise ConfigError(
                f"config field 'num_nextn_predict_layers' is {self.num_nextn_predict_layers}; "
                "at most 1 MTP block is supported"
            )
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > min(self.head_dim, self.index_head_dim):
            raise ConfigError(
                f"config field 'qk_rope_head_dim' is {self.qk_rope_head_dim}; it must be even and at most "
                f"head_dim ({self.head_dim}) and index_head_dim ({self.index_head_dim})"
            )
        if self.num_attention_heads % self.o_groups:
            raise ConfigError(
                f"config field 'o_groups' is {self.o_groups}; it must divide num_attention_heads "
                f"({self.num_attention_heads})"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ConfigError(
                f"config field 'num_experts_per_tok' is {self.num_experts_per_tok}, more than "
                f"n_routed_experts ({self.n_routed_experts})"
            )
        if self.scoring_func not in SCORING_FUNCS:
            raise ConfigError(
                f"config field 'scoring_func' is {self.scoring_func!r}; supported: {', '.join(SCORING_FUNCS)}"
            )
        if not self.norm_topk_prob:
            raise ConfigError("config field 'norm_topk_prob' is false; this family normalises expert weights")

    @property
    def num_mtp_blocks(self) -> int:
        """MTP blocks that the config announces (0 or 1)."""
        return self.num_nextn_predict_layers

    def is_hash_layer(self, layer_idx: int) -> bool:
        """Whether decoder layer `layer_idx` takes its experts from a table by token id."""
        return layer_idx < self.num_hash_layers

    def rope_for(self, ratio: int) -> RopeConfig:
        """RoPE of a layer with this compress ratio (plain for 0, compress base with YaRN otherwise)."""
        return self.compress_rope if ratio else self.rope

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json in the official or the Hugging Face spelling.

        Args:
            raw: the parsed JSON object. Fields that do not shape the model are ignored.

        Returns:
            The validated config.

        Raises:
            ConfigError: a field is missing, has an impossible value, or two fields disagree.
        """
        return cls(**read_fields(raw))

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Read `path`/config.json.

        Args:
            path: a checkpoint directory.

        Returns:
            The validated config.

        Raises:
            CheckpointError: the directory or the file is absent, or the file is not a JSON object.
            ConfigError: as `from_dict`.
        """
        return cls.from_dict(read_json(Path(path) / "config.json"))


_POSITIVE_FIELDS = (
    "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "n_routed_experts",
    "num_experts_per_tok", "n_shared_experts", "index_n_heads", "index_head_dim", "index_topk",
    "sliding_window", "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings",
)  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object from a file.

    Args:
        path: the file.

    Returns:
        The object.

    Raises:
        CheckpointError: the file is absent, not UTF-8 JSON, or not an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        where = "the directory holds no such file" if path.parent.is_dir() else "no such directory"
        raise CheckpointError(f"{path}: {where}; a checkpoint directory needs {path.name}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return value


def cache_dir() -> Path:
    """Where built kernels are kept: $XDG_CACHE_HOME/polytempo, by default ~/.cache/polytempo."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "polytempo"
