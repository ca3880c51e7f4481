"""What `make invariance` asks of C++ kernels and of whole forwards: rows computed together, any first and number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.cache.layout import Segment, StateShape
from polytempo.cache.store import RowStore
from polytempo.config import ModelConfig
from polytempo.engine_config import EngineConfig
from polytempo.kernels import ops
from polytempo.kernels.build import load_or_note
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.forward import target_forward
from polytempo.model.rope import RopeTables

POSITION = 300
ROWS = 70


class NativeProbe(NamedTuple):
    """One kernel, or all of them in a forward.

    Attributes:
        op: name.
        shape: for the table.
        form: (first, count) -> the results of `count` rows from `first` on, computed together.
        num_rows: how many rows there are.
    """

    op: str
    shape: str
    form: Callable[[int, int], Tensor]
    num_rows: int


def kernels_in_use() -> str:
    """The instruction set that the kernels were built for, or that torch is used."""
    library = load_or_note()
    return "torch" if library is None else library.pt_instructions().decode()


def linear_probe(x: Tensor, weight: Tensor) -> Callable[[int, int], Tensor] | None:
    """Rows of x [M, K] through the kernel of weight [N, K]; None where there are no kernels."""
    library = load_or_note() if x.device.type == "cpu" else None
    if library is None:
        return None
    x, weight = x.contiguous(), weight.contiguous()
    return lambda first, count: ops.linear(library, x[first : first + count], weight)


def forward_probes(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, kernels: str | None = None
) -> Iterator[NativeProbe]:
    """A whole forward, by rows and by the tokens of a chunk, through three layers of this kind of model.

    Args:
        config: gives widths of heads, ranks and streams; vocabulary, experts and hidden size are bounded, since they
            change nothing but how often a loop runs.
        dtype: of weights and state.
        device: where they lie.
        kernels: what runs it: on the CPU "native" by default, and then nothing is yielded where there are none;
            elsewhere "auto".
    """
    kernels = kernels or ("native" if device.type == "cpu" else "auto")
    if kernels == "native" and load_or_note() is None:
        return
    small = replace(
        config, vocab_size=min(config.vocab_size, 512), hidden_size=min(config.hidden_size, 512),
        n_routed_experts=min(config.n_routed_experts, max(32, config.num_experts_per_tok)), num_hidden_layers=3,
        compress_ratios=(0, 4, 128), num_hash_layers=0,
    )  # fmt: skip
    harness = _Rows(small, dtype, device, kernels)
    shape = f"hidden {small.hidden_size}, {small.num_attention_heads} heads of {small.head_dim}"
    name = "native forward" if kernels == "native" else "forward"
    yield NativeProbe(f"{name} by rows", shape, harness.rows, ROWS)
    yield NativeProbe(f"{name} by chunk", shape, harness.chunk, ROWS)


class _Rows:
    """A random model with ROWS rows, each at a position of its own."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, kernels: str) -> None:
        self.model = _random_model(config, dtype, device).with_kernels(kernels)
        limits = EngineConfig(max_rows=ROWS, max_model_len=512, max_chunk=400, max_step_tokens=32768)
        self.tables = RopeTables.build(config, limits.max_model_len, device)
        self.store = RowStore.allocate(StateShape.build(config, limits), ROWS, dtype, device)
        self.ids = torch.randint(0, config.vocab_size, (ROWS, 512)).tolist()
        self._forward([Segment(row, 0, self.ids[row][: POSITION + row]) for row in range(ROWS)])

    def rows(self, first: int, count: int) -> Tensor:
        """The next token of every row, at its own position."""
        return self._forward([Segment(row, POSITION + row, self.ids[row][POSITION + row : POSITION + row + 1])
                              for row in range(first, first + count)])  # fmt: skip

    def chunk(self, first: int, count: int) -> Tensor:
        """Consecutive tokens of row 0."""
        start = POSITION + first
        return self._forward([Segment(0, start, self.ids[0][start : start + count])])

    def _forward(self, segments: list[Segment]) -> Tensor:
        view = self.store.target_view(segments, self.model.config.compress_ratios)
        return target_forward(self.model, self.tables, self.store, view).flatten(1)


def _random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DeepseekV4:
    model = DeepseekV4(config, dtype, device)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, device=device)
        if weight.dim() == 1:
            weight.data.copy_(1 + 0.2 * noise)
        else:
            weight.data.copy_(noise if "embed" in name else noise * 1.6 / weight.shape[-1] ** 0.5)
    return model.requires_grad_(False)
