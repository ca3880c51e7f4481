"""An additive mask over raw keys that a caller hands to a forward: it composes with ours and is never dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from polytempo.cache.view import BatchView, TileGroup
from polytempo.errors import ConfigError


def check_caller_mask(mask: Tensor, view: BatchView, num_heads: int) -> Tensor:
    """Bring a caller's mask to rank 4, or refuse it before any state is written.

    Rows' queries end together: query T_q − 1 is every row's last token, and a row that brings fewer than T_q tokens
    uses the last ones. Columns are those of the window layout: column c holds position c at `ring`, and position
    c − lead at `left_aligned`; columns that are dead, in the future or outside the window stay masked whatever
    the caller says.

    Args:
        mask: floating, added to the scores of raw keys; [T_q, K] for all rows and heads, or [B, H, T_q, K] with B the
            forward's segments or 1 and H the attention heads or 1. T_q is the widest segment's tokens, K the columns
            of the forward (`view.num_columns`).
        view: the forward.
        num_heads: attention heads of the model.

    Returns:
        The mask, [B or 1, H or 1, T_q, K].

    Raises:
        ConfigError: the dtype is not floating, or a dimension has another size; the message names it.
    """
    if not mask.is_floating_point():
        raise ConfigError(f"caller mask has dtype {mask.dtype}; it is added to scores and must be floating point")
    if mask.dim() not in (2, 4):
        raise ConfigError(f"caller mask has rank {mask.dim()}; it must be [T_q, K] or [B, H, T_q, K]")
    wanted = {"T_q (tokens of the widest segment)": (-2, {view.most_tokens}),
              "K (columns of raw keys)": (-1, {view.num_columns})}  # fmt: skip
    if mask.dim() == 4:
        wanted["B (rows)"] = (0, {1, view.ends.shape[0]})
        wanted["H (heads)"] = (1, {1, num_heads})
    for name, (dim, sizes) in wanted.items():
        if mask.shape[dim] not in sizes:
            allowed = " or ".join(str(size) for size in sorted(sizes))
            raise ConfigError(
                f"caller mask of shape {list(mask.shape)}: {name} is {mask.shape[dim]}; it must be {allowed}"
            )
    return mask if mask.dim() == 4 else mask[None, None]


def tile_mask(mask: Tensor, view: BatchView, group: TileGroup) -> Tensor:
    """A checked mask's part for each tile.

    Args:
        mask: [B or 1, H or 1, T_q, K].
        view: the forward.
        group: tiles of N rows, Q queries and C columns.

    Returns:
        [N, Q, H or 1, C], to be added to the scores.
    """
    query = group.positions - view.ends[group.segment_idx].unsqueeze(1) + mask.shape[2]
    column = group.key_positions + view.leads[group.segment_idx].unsqueeze(1)
    column = column.clamp(0, mask.shape[3] - 1)
    row = group.segment_idx if mask.shape[0] > 1 else torch.zeros_like(group.segment_idx)
    head = torch.arange(mask.shape[1], device=mask.device)
    return mask[row.view(-1, 1, 1, 1), head.view(1, 1, -1, 1), query[:, :, None, None], column[:, None, None, :]]
