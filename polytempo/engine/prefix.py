"""Prefix reuse: snapshots of rows' state, found again by the tokens that led to them."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from polytempo.cache.snapshot import SPAN, Snapshot, restore_snapshot, take_snapshot
from polytempo.cache.store import RowStore
from polytempo.engine.row import Row

ROOT = b""


@dataclass(frozen=True)
class _Node:
    token_ids: tuple[int, ...]
    snapshot: Snapshot


def span_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of the prefix that ends with these tokens after the prefix `parent`."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class PrefixCache:
    """Snapshots by token prefix, least recently used ones dropped first.

    A prefix is a chain of spans. Whoever uses a span uses those before it too, later in order of use, so a span is
    never dropped before what builds on it.

    Attributes:
        capacity: most bytes of all snapshots together.
        num_bytes: bytes held.
        num_queries: rows that asked.
        num_hits: of them, those that found something.
        num_cached_tokens: tokens that did not have to be computed.
    """

    def __init__(self, store: RowStore, capacity: int) -> None:
        self.store, self.capacity = store, capacity
        self.num_bytes = self.num_queries = self.num_hits = self.num_cached_tokens = 0
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def restore(self, row: Row) -> Tensor | None:
        """Give a newly seated row the state of the longest known prefix of its tokens.

        At least the last token is left to be fed, since the next one is sampled from it; a row whose prompt's
        log-probabilities are wanted computes them all.

        Args:
            row: in a cleared slot; its kv_len and num_cached are set.

        Returns:
            Streams [1, hc, D] of its last restored position, None if nothing was found.
        """
        self.num_queries += 1
        keys = [] if row.request.prompt_logprobs is not None else self._known(row)
        if not keys:
            return None
        chain = [self._nodes[key].snapshot for key in keys]
        restore_snapshot(self.store, row.slot, chain)
        self._touch(keys)
        row.kv_len = len(chain) * SPAN
        if not row.num_set_back:
            row.num_cached = row.kv_len
        self.num_hits += 1
        self.num_cached_tokens += row.kv_len
        return chain[-1].streams

    def is_due(self, row: Row, start: int) -> bool:
        """Whether a row that fed tokens from position `start` on has crossed a boundary."""
        return row.kv_len // SPAN > start // SPAN

    def keep(self, row: Row, start: int, streams: Tensor) -> None:
        """Take snapshots at the boundaries that a row crossed in a step.

        Args:
            row: going on; its tokens up to kv_len are committed and in the store.
            start: position of the first token that it fed.
            streams: [n, hc, D], the target's of the positions from `start` on.
        """
        if not self.is_due(row, start):
            return
        # Not finite, a token of this request may have spoilt the state of those before it (0 · NaN under a mask), and a
        # request that shares only these would fail with it.
        if not bool(streams[: row.kv_len - start].isfinite().all()):
            return
        keys: list[bytes] = []
        for boundary in range(SPAN, row.kv_len + 1, SPAN):
            token_ids = tuple(row.tokens(boundary - SPAN, boundary))
            parent = keys[-1] if keys else ROOT
            key = span_key(parent, token_ids)
            if key not in self._nodes:
                if boundary <= start:
                    # An earlier span was dropped, and its state is gone from the rings: what follows could not be used.
                    return
                snapshot = take_snapshot(self.store, row.slot, boundary, streams[boundary - 1 - start])
                self._nodes[key] = _Node(token_ids, snapshot)
                self.num_bytes += snapshot.num_bytes
            keys.append(key)
        if keys:
            self._touch(keys)
            self._evict()

    def _known(self, row: Row) -> list[bytes]:
        keys: list[bytes] = []
        for start in range(0, row.num_tokens - SPAN, SPAN):
            token_ids = tuple(row.tokens(start, start + SPAN))
            key = span_key(keys[-1] if keys else ROOT, token_ids)
            node = self._nodes.get(key)
            # The key is a hash of all tokens before; that equal keys mean equal tokens is checked, not believed.
            if node is None or node.token_ids != token_ids:
                break
            keys.append(key)
        return keys

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._nodes.move_to_end(key)

    def _evict(self) -> None:
        while self.num_bytes > self.capacity:
            _, node = self._nodes.popitem(last=False)
            self.num_bytes -= node.snapshot.num_bytes
