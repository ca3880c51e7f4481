"""One softmax over a query's keys, in one pass; twin: model.cached_attention.attend_blocks.

A program has one query and 16 of its heads, so nothing depends on the tile that the query was put in. It walks the
keys in ascending blocks. The running maximum starts at the sink, which is finite, so a block that the query does not
see at all changes nothing, exactly: it is added with a weight of 0, and what was there is multiplied by 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from polytempo.errors import InvariantError
from polytempo.gpu import grid
from polytempo.gpu.products import check_operands

BLOCK_HEADS, BLOCK_KEYS = 16, 32
MAX_PARTS = 2


@triton.jit
def attend_part(
    queries, highest, total, values, keys, mask, num_keys, dim, scale,
    BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """The running softmax (highest, total, values) after more keys.

    Args:
        queries: [BLOCK_HEADS, BLOCK_DIM].
        highest: [BLOCK_HEADS], the highest score so far.
        total: [BLOCK_HEADS], Σ exp(score − highest) so far.
        values: [BLOCK_HEADS, BLOCK_DIM], Σ exp(score − highest) · key so far.
        keys: pointer to keys [num_keys, dim].
        mask: pointer to a byte for each key, not 0 where the query sees it.
        num_keys: a multiple of BLOCK_KEYS.
        dim: head_dim.
        scale: of the scores.
        BLOCK_KEYS: keys at a time.
        BLOCK_DIM: a power of two, at least head_dim.
    """
    dims = tl.arange(0, BLOCK_DIM)
    for start in range(0, num_keys, BLOCK_KEYS):
        places = start + tl.arange(0, BLOCK_KEYS)
        seen = tl.load(mask + places) != 0
        # Cells that are not seen are not read: 0 · NaN is NaN.
        block = tl.load(
            keys + places[:, None] * dim + dims[None, :], mask=seen[:, None] & (dims < dim)[None, :], other=0.0
        )  # fmt: skip
        scores = tl.dot(queries, tl.trans(block)) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - higher[:, None]), tl.exp(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        values = values * shrink[:, None] + tl.dot(weights.to(block.dtype), block)
        highest = higher
    return highest, total, values


# One program for tiles of one query and of many.
@triton.jit(do_not_specialize=["num_queries"])
def attend_kernel(
    queries, sink, out, num_queries, num_heads, dim, scale,
    keys, mask, num_keys, keys_tile_step, keys_query_step, mask_tile_step,
    more_keys, more_mask, num_more_keys, more_keys_tile_step, more_keys_query_step, more_mask_tile_step,
    BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """BLOCK_HEADS heads of one query of out [N, Q, heads, head_dim]; neighbouring programs share its keys."""
    head_blocks = (num_heads + BLOCK_HEADS - 1) // BLOCK_HEADS
    query_idx = tl.program_id(0) // head_blocks
    tile, place = (query_idx // num_queries).to(tl.int64), (query_idx % num_queries).to(tl.int64)
    heads = tl.program_id(0) % head_blocks * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_DIM)
    cells = (query_idx.to(tl.int64) * num_heads + heads[:, None]) * dim + dims[None, :]
    in_out = (heads < num_heads)[:, None] & (dims < dim)[None, :]
    own = tl.load(queries + cells, mask=in_out, other=0.0)
    highest = tl.load(sink + heads, mask=heads < num_heads, other=0.0)
    total = tl.full((BLOCK_HEADS,), 1.0, tl.float32)  # exp(sink − sink), and no value
    values = tl.zeros((BLOCK_HEADS, BLOCK_DIM), tl.float32)
    highest, total, values = attend_part(
        own, highest, total, values, keys + tile * keys_tile_step + place * keys_query_step,
        mask + tile * mask_tile_step + place * num_keys, num_keys, dim, scale, BLOCK_KEYS, BLOCK_DIM,
    )  # fmt: skip
    highest, total, values = attend_part(
        own, highest, total, values, more_keys + tile * more_keys_tile_step + place * more_keys_query_step,
        more_mask + tile * more_mask_tile_step + place * num_more_keys, num_more_keys, dim, scale,
        BLOCK_KEYS, BLOCK_DIM,
    )  # fmt: skip
    tl.store(out + cells, values / total[:, None], mask=in_out)


def attend(queries: Tensor, parts: Sequence[tuple[Tensor, Tensor]], sink: Tensor, scale: float) -> Tensor:
    """One softmax over all parts with a sink.

    Args:
        queries: [N, Q, heads, head_dim] bfloat16. float32 would not fit a program's registers.
        parts: one or two key sets in reduction order: keys, of the same dtype, [N, C, head_dim] if the queries of a
            tile share them and [N, Q, C, head_dim] if each has its own; and a mask [N or 1, Q, C] bool, True where the
            query sees the key. C is a multiple of 32.
        sink: [heads] float32, a logit without a value.
        scale: of the scores.

    Returns:
        [N, Q, heads, head_dim] float32; a query's result is a function of itself, and of the keys that it sees and
        their columns.

    Raises:
        InvariantError: the operands do not fit each other.
    """
    check_operands(queries, *(keys for keys, _ in parts))
    (num_tiles, num_queries, num_heads, dim), arguments = queries.shape, []
    if queries.dtype != torch.bfloat16 or not 1 <= len(parts) <= MAX_PARTS:
        raise InvariantError(f"Triton attention got queries in {queries.dtype} and {len(parts)} sets of keys")
    for keys, mask in parts:
        num_keys = keys.shape[-2]
        own = (num_queries,) if keys.dim() == 4 else ()
        if (
            keys.shape != (num_tiles, *own, num_keys, dim) or num_keys % BLOCK_KEYS
            or mask.shape not in ((num_tiles, num_queries, num_keys), (1, num_queries, num_keys))
        ):  # fmt: skip
            raise InvariantError(
                f"Triton attention got queries {tuple(queries.shape)}, keys {tuple(keys.shape)} and a mask "
                f"{tuple(mask.shape)}"
            )
        steps = num_queries * num_keys * dim if own else num_keys * dim, num_keys * dim if own else 0
        mask_step = num_queries * num_keys if len(mask) > 1 else 0
        arguments += keys.contiguous(), mask.contiguous().view(torch.uint8), num_keys, *steps, mask_step
    if len(parts) < MAX_PARTS:
        arguments += *arguments[:2], 0, 0, 0, 0
    out = torch.empty_like(queries, dtype=torch.float32, memory_format=torch.contiguous_format)
    grid.launch(
        attend_kernel, num_tiles * num_queries * triton.cdiv(num_heads, BLOCK_HEADS),
        queries.contiguous(), sink, out, num_queries, num_heads, dim, scale, *arguments,
        BLOCK_HEADS=BLOCK_HEADS, BLOCK_KEYS=BLOCK_KEYS, BLOCK_DIM=max(16, triton.next_power_of_2(dim)),
    )  # fmt: skip
    return out
