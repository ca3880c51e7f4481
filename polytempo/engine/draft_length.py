"""How many drafts a row gets next. Integers only, no torch."""

from __future__ import annotations

from polytempo.config import EngineConfig
from polytempo.engine.row import Row


def draft_length(row: Row, config: EngineConfig) -> int:
    """Drafts to propose for a row's next step.

    A verify of k drafts emits up to k + 1 tokens, so no draft is made that max_tokens or the context would cut off;
    a row that is still in its prompt gets none.

    Args:
        row: after its tokens were committed.
        config: gives the engine's draft length and limits.

    Returns:
        0 … the request's own draft length, or the engine's if the request names none.
    """
    if row.is_finished or not row.is_decoding:
        return 0
    params = row.request.params
    wanted = config.draft_len if params.draft_len is None else params.draft_len
    room = config.max_model_len - row.num_tokens
    if params.max_tokens is not None:
        room = min(room, params.max_tokens - len(row.output_token_ids))
    return max(0, min(wanted, room - 1, config.max_chunk - 1))
