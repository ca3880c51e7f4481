"""What `polytempo.invariance` probes: every operation on the path of a forward, at the shapes of a model.

A probe computes some of its rows together, in torch's raw form and in the form that polytempo uses, and compares
them with the same rows among all others. Products get inputs that cancel, so that an order of summation shows in
every result rather than in one of ten thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from polytempo.cache.layout import BLOCK
from polytempo.config import ModelConfig
from polytempo.model import ops
from polytempo.model.compressor import choose_entries
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.native_probes import forward_probes, linear_probe

COUNTS = (*range(1, 41), 63, 64, 65, 100, 128, 256, 500, 512)
MAX_COLUMNS = 32768

Rows = Callable[[int, int], Tensor]
"""(first, count) -> the results of `count` rows from `first` on, computed together."""


@dataclass(frozen=True)
class Probe:
    """One operation at one shape.

    Attributes:
        op: name.
        shape: for the table.
        dtype: of the inputs.
        raw: torch's form.
        ours: the form that polytempo uses; None: the raw one.
        fallback: what ours does differently.
        counts: row counts, ascending; the last is the reference.
        offsets: first rows to start from besides 0.
        same_result: the rows are added beside the result (key columns that nobody sees): all results are equal.
    """

    op: str
    shape: str
    dtype: torch.dtype
    raw: Rows
    ours: Rows | None = None
    fallback: str = "none needed"
    counts: Sequence[int] = COUNTS
    offsets: Sequence[int] = (0, 5)
    same_result: bool = False

    def differing(self, form: Rows) -> list[int]:
        """Row counts at which `form` gives a row another result than at the largest count."""
        total = self.counts[-1]
        full = form(0, total)
        found = []
        for count in self.counts[:-1]:
            for first in self.offsets:
                if first + count > total:
                    continue
                expected = full if self.same_result else full[first : first + count]
                if not torch.equal(form(first, count), expected):
                    found.append(count)
                    break
        return found


def cancelling(rows: int, depth: int, columns: int, dtype: torch.dtype, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Factors [batch, rows, depth] and [batch, columns, depth] whose products sum to zero but for rounding."""
    half = (depth + 1) // 2
    left, right = torch.randn(batch, rows, half), torch.randn(batch, columns, half)
    order = torch.randperm(2 * half)[:depth]
    left, right = torch.cat((left, -left), 2)[..., order], torch.cat((right, right), 2)[..., order]
    return left.to(dtype), right.to(dtype)


def padded_to(dtype: torch.dtype, depth: int, width: int) -> str:
    """Name of the fall-back of a matrix product."""
    needed = ops.min_rows(dtype, depth, width)
    return f"pad to {needed} rows" if needed > 1 else "none needed"


def weight_shapes(config: ModelConfig, dtype: torch.dtype) -> dict[tuple[int, int, torch.dtype], list[str]]:
    """Every [K, N] and dtype that `ops.linear` meets in a model, and the weights that have it."""
    shapes: dict[tuple[int, int, torch.dtype], list[str]] = {}
    for path, weight in DeepseekV4(config, dtype, device="meta").named_parameters():
        if weight.dim() < 2 or path.endswith(("ape", "embed.weight", "wo_a.weight")):
            continue
        name = ".".join(part for part in path.split(".") if not part.isdigit() and part not in ("layers", "weight"))
        names = shapes.setdefault((weight.shape[-1], weight.shape[-2], weight.dtype), [])
        if name not in names:
            names.append(name)
    return shapes


def linear_probes(config: ModelConfig, dtype: torch.dtype) -> Iterator[Probe]:
    """`ops.linear` at every weight shape."""
    for (depth, width, weight_dtype), names in weight_shapes(config, dtype).items():
        x, weight = (part[0] for part in cancelling(COUNTS[-1], depth, min(width, MAX_COLUMNS), weight_dtype))
        yield Probe(
            f"linear {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
            f"K {depth}, N {weight.shape[0]}",
            weight_dtype,
            raw=lambda first, count, x=x, w=weight: F.linear(x[first : first + count], w),
            ours=lambda first, count, x=x, w=weight: ops.linear(x[first : first + count], w),
            fallback=padded_to(weight_dtype, depth, weight.shape[0]),
        )
        native = linear_probe(x, weight)
        if native is not None:
            op = f"native linear {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            yield Probe(op, f"K {depth}, N {weight.shape[0]}", weight_dtype, native, fallback="C++ kernel")


def whole_forward_probes(config: ModelConfig, dtype: torch.dtype) -> Iterator[Probe]:
    """A whole forward: of all C++ kernels together, or of a device."""
    device = torch.get_default_device()
    for op, shape, form, num_rows in forward_probes(config, dtype, device):
        counts = (*range(1, 20), 31, 32, 33, 64, num_rows)
        fallback = "C++ kernels" if device.type == "cpu" else "none needed"
        yield Probe(op, shape, dtype, form, fallback=fallback, counts=counts, offsets=(0, 3))


def product_probes(config: ModelConfig, dtype: torch.dtype) -> Iterator[Probe]:
    """`ops.matmul` as attention, output projection and indexer call it: by rows, by tiles, by key columns."""
    keys = 4 * BLOCK
    shapes = (
        ("QK", config.head_dim, keys, dtype, True),
        ("PV", BLOCK, config.head_dim, dtype, False),
        ("wo_a", config.num_attention_heads * config.head_dim // config.o_groups, config.o_lora_rank, dtype, False),
        ("indexer", config.index_head_dim, keys, torch.float32, True),
    )
    for name, depth, width, used_dtype, has_key_columns in shapes:
        tiles = config.o_groups if name == "wo_a" else 8
        left, right = cancelling(COUNTS[-1], depth, width, used_dtype, tiles)
        right = right.transpose(1, 2)
        if not has_key_columns and name != "wo_a":
            right = right.contiguous()
        shape, fallback = f"K {depth}, N {width}", padded_to(used_dtype, depth, width)
        forms = (torch.matmul, ops.matmul)

        def by_rows(first: int, count: int, form, left=left, right=right) -> Tensor:
            return form(left[:1, first : first + count], right[:1]).transpose(0, 1)

        def by_tiles(first: int, count: int, form, left=left, right=right) -> Tensor:
            heads = config.num_attention_heads
            return form(left[first : first + count, :heads], right[first : first + count])

        def by_columns(first: int, count: int, form, left=left, right=right) -> Tensor:
            return form(left[:2, :64], right[:2, :, : count * BLOCK])[:, :, :BLOCK]

        cases = [(by_rows, "rows", COUNTS, (0, 5), False)]
        if name != "wo_a":
            cases.append((by_tiles, "tiles", tuple(range(1, tiles + 1)), (0, 1), False))
        if has_key_columns:
            cases.append((by_columns, "key blocks", (1, 2, 3, 4), (0,), True))
        for rows_of, unit, counts, offsets, same in cases:
            raw, ours = (lambda first, count, f=form, r=rows_of: r(first, count, f) for form in forms)
            op = f"matmul {name} by {unit}"
            yield Probe(op, shape, used_dtype, raw, ours, fallback, counts, offsets, same)


def reduction_probes(config: ModelConfig, dtype: torch.dtype) -> Iterator[Probe]:
    """RMSNorm's mean at every normalised width, and the sums of a key block and of a span."""
    hc_width = config.hc_mult * config.hidden_size
    for width in sorted({config.hidden_size, hc_width, config.head_dim, config.q_lora_rank, config.index_head_dim}):
        x = (torch.randn(COUNTS[-1], width) * torch.rand(COUNTS[-1], width) * 3).to(dtype)
        yield Probe(
            "RMSNorm mean",
            f"{width} channels",
            dtype,
            raw=lambda first, count, x=x: x[first : first + count].float().square().mean(-1),
            ours=lambda first, count, x=x: ops.unweighted_rms_norm(x[first : first + count], config.rms_norm_eps),
            fallback="float32",
        )
    for size, dim, what in ((BLOCK, 1, "key block"), (128, 1, "span of 128"), (8, 1, "two spans of 4")):
        x = torch.randn(COUNTS[-1], size, 16)
        yield Probe(
            "sum",
            what,
            torch.float32,
            raw=lambda first, count, x=x, d=dim: x[first : first + count].sum(d),
            ours=lambda first, count, x=x, d=dim: ops.tree_sum(x[first : first + count], d),
            fallback="tree of halves",
        )


def elementwise_probes() -> Iterator[Probe]:
    """Activations over flat runs of elements: kernels may treat a tail apart."""
    x = torch.randn(COUNTS[-1]) * 4
    pairs: tuple[tuple[str, Callable, Callable | None, str], ...] = (
        ("exp", torch.exp, None, "none needed"),
        ("log1p", lambda t: torch.log1p(t.abs()), None, "none needed"),
        ("sqrt", lambda t: torch.sqrt(t.abs()), None, "none needed"),
        ("rsqrt", lambda t: torch.rsqrt(t.abs() + 1e-6), None, "none needed"),
        ("sigmoid", torch.sigmoid, ops.sigmoid, "exp form"),
        ("silu · up", lambda t: F.silu(t) * t, lambda t: ops.swiglu(t, t, 10.0), "exp form"),
        ("sqrt softplus", lambda t: F.softplus(t).sqrt(), ops.sqrt_softplus, "log1p of exp"),
    )
    for name, raw, ours, fallback in pairs:
        yield Probe(
            name,
            "flat",
            torch.float32,
            raw=lambda first, count, f=raw: f(x[first : first + count]),
            ours=None if ours is None else lambda first, count, f=ours: f(x[first : first + count]),
            fallback=fallback,
        )


def choice_probes(config: ModelConfig) -> Iterator[Probe]:
    """Choices among equal scores: experts, entries, and the greedy token."""
    experts = torch.randint(0, 8, (COUNTS[-1], config.n_routed_experts)).float()
    logits = torch.randint(0, 50, (COUNTS[-1], min(config.vocab_size, MAX_COLUMNS))).float()
    top_k = config.num_experts_per_tok

    def of_rows(scores: Tensor, choose: Callable[[Tensor], Tensor]) -> Rows:
        return lambda first, count: choose(scores[first : first + count])

    shape = f"{top_k} of {config.n_routed_experts}"
    yield Probe("topk by rows", shape, torch.float32, of_rows(experts, lambda s: s.topk(top_k, dim=-1).indices))
    sort = of_rows(experts, lambda s: s.sort(dim=-1, descending=True, stable=True).indices)
    yield Probe("sort by rows", f"{config.n_routed_experts} columns", torch.float32, sort)
    argmax = of_rows(logits, lambda s: s.argmax(-1))
    yield Probe("argmax by rows", f"{logits.shape[1]} columns", torch.float32, argmax)
    kept, visible = min(config.index_topk, 16), 60
    scores = torch.randint(0, 6, (12, 40 * BLOCK)).float()
    hidden = torch.arange(scores.shape[1]) >= visible

    def topk(first: int, count: int) -> Tensor:
        return scores.masked_fill(hidden, -torch.inf)[:, : count * BLOCK].topk(kept, dim=-1).indices.sort(-1).values

    def ours(first: int, count: int) -> Tensor:
        return choose_entries(scores[:, : count * BLOCK], torch.full((12,), visible), kept)

    yield Probe("topk by key blocks", f"{kept} of {visible}", torch.float32, topk, ours, "stable sort",
                tuple(range(1, 41)), (0,), True)  # fmt: skip


def probes(config: ModelConfig, dtypes: Sequence[torch.dtype]) -> Iterator[Probe]:
    """Every probe of a model, each built when its turn comes."""
    seen = set()
    for dtype in dtypes:
        for group in (linear_probes, whole_forward_probes, product_probes, reduction_probes):
            for probe in group(config, dtype):
                key = (probe.op, probe.shape, probe.dtype)
                if key not in seen:
                    seen.add(key)
                    yield probe
    yield from elementwise_probes()
    yield from choice_probes(config)
