"""The cached forwards: any ragged mixture of prompt chunks and single tokens through target or MTP block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polytempo.cache.layout import Segment
from polytempo.cache.store import RowStore
from polytempo.cache.streams import keep_forward
from polytempo.cache.view import BatchView
from polytempo.cache.window import WindowLayout
from polytempo.device import to_device
from polytempo.model.cached_attention import CachedAttention, write_window
from polytempo.model.caller_mask import check_caller_mask
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.hyper import collapse
from polytempo.model.ops import by_own_kernels
from polytempo.model.rope import RopeTables


@torch.inference_mode()
@by_own_kernels
def target_forward(
    model: DeepseekV4, tables: RopeTables, store: RowStore, view: BatchView, caller_mask: Tensor | None = None,
    keeps_streams: bool = False,
) -> Tensor:  # fmt: skip
    """Run the target over the view's tokens, writing their state.

    Args:
        model: weights.
        tables: RoPE over the store's positions.
        store: state of all rows; the view's rows must hold everything before their tokens.
        view: the packed tokens.
        caller_mask: added to every layer's scores of raw keys; see `check_caller_mask` for its shapes.
        keeps_streams: whether the tokens' last-layer streams go to `store.mtp_streams` too; none may be a draft.

    Returns:
        Last-layer streams [T, hc, D] before hc_head, in the model dtype.

    Raises:
        ConfigError: the caller's mask does not fit this forward; nothing was written.
    """
    if caller_mask is None and uses_kernels(model, store.target_windows):
        return model.native.target(tables, store, view, keeps_streams)
    if caller_mask is not None:
        caller_mask = check_caller_mask(caller_mask, view, model.config.num_attention_heads)
    streams = model.embed_streams(view.token_ids)
    for layer, state in zip(model.layers, store.layers, strict=True):
        streams = layer(streams, view.token_ids, CachedAttention(state, view, tables, caller_mask))
    if keeps_streams:
        keep_forward(store.mtp_streams, view, streams)
    return streams


@torch.inference_mode()
@by_own_kernels
def mtp_forward(
    model: DeepseekV4, tables: RopeTables, store: RowStore, view: BatchView, streams: Tensor
) -> Tensor:
    """Run the MTP block over pairs (streams of position p, token of p + 1).

    Args:
        model: weights with an MTP block.
        tables: RoPE over the store's positions.
        store: state of all rows.
        view: positions are the pairs' p; token_ids are the tokens of p + 1.
        streams: [T, hc, D], the target's at the same positions, or the previous draft's.

    Returns:
        The block's output streams [T, hc, D]: the next draft's input, and `model.mtp_logits` gives its logits.
    """
    if uses_kernels(model, store.mtp_windows):
        return model.native.mtp_block(tables, store, view, streams, view.num_tokens)
    block = model.mtp[0]
    inputs = block.combine(streams, model.embed(view.token_ids))
    return block(inputs, view.token_ids, CachedAttention(store.mtp[0], view, tables))


@torch.inference_mode()
@by_own_kernels
def mtp_write(model: DeepseekV4, tables: RopeTables, store: RowStore, view: BatchView, streams: Tensor) -> None:
    """Write the MTP block's keys of pairs (streams of position p, token of p + 1), without running the block.

    Its key at p is a function of that pair alone, so this is all that a row needs while it does not draft.

    Args:
        model: weights with an MTP block.
        tables: RoPE over the store's positions.
        store: state of all rows.
        view: positions are the pairs' p; token_ids are the tokens of p + 1.
        streams: [T, hc, D], the target's at the same positions.
    """
    if uses_kernels(model, store.mtp_windows):
        model.native.mtp_block(tables, store, view, streams, 0)
        return
    block = model.mtp[0]
    inputs = block.combine(streams, model.embed(view.token_ids))
    x = block.attn_norm(collapse(inputs, block.hc_attn(inputs).pre))
    kv = block.attn.project_kv(x, tables.plain.at(view.positions))
    write_window(store.mtp[0].window, view, kv)


@torch.inference_mode()
@by_own_kernels
def mtp_catch_up(
    model: DeepseekV4, tables: RopeTables, store: RowStore, written: Sequence[Segment], queried: Sequence[Segment],
    streams: Tensor, token_idx: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """`mtp_write` for some pairs and then `mtp_forward` for others, which may be of the same rows.

    Args:
        model: weights with an MTP block.
        tables: RoPE over the store's positions.
        store: state of all rows.
        written: pairs whose keys alone are written.
        queried: pairs that run through the whole block.
        streams: [S, hc, D], the target's, or the previous draft's.
        token_idx: which of the streams is each pair's, those of `written` first; None: S pairs in the same order.

    Returns:
        The block's output streams [Q, hc, D] of the queried pairs.
    """
    num_written = sum(len(segment.token_ids) for segment in written)
    if uses_kernels(model, store.mtp_windows):
        view = store.mtp_view([*written, *queried])
        return model.native.mtp_block(tables, store, view, streams, view.num_tokens - num_written, token_idx)
    if token_idx is not None:
        streams = streams[to_device(token_idx, streams.device)]
    if written:
        mtp_write(model, tables, store, store.mtp_view(written), streams[:num_written])
    if not queried:
        return streams[:0]
    return mtp_forward(model, tables, store, store.mtp_view(queried), streams[num_written:])


def uses_kernels(model: DeepseekV4, windows: WindowLayout) -> bool:
    """Whether the C++ kernels run a forward.

    Args:
        model: with its choice of kernels.
        windows: layout of the state; the kernels know none but the ring.
    """
    return windows.name == "ring" and model.native is not None
