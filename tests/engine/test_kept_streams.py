"""Streams that wait for the MTP block's keys: which are kept, and where."""

import pytest
import torch
from support import ENGINE, TINY, Harness, random_ids, random_model

from polytempo.cache.layout import Segment
from polytempo.cache.streams import keep_spans
from polytempo.model.forward import target_forward

WINDOW = TINY.sliding_window
UNTOUCHED = 16384.0


def expected_rings(like, fed, streams):
    """Cell by cell: of (slot, position, place in `streams`) in order, the last that a cell is given stays."""
    rings = torch.full_like(like, UNTOUCHED)
    for slot, position, place in fed:
        rings[slot, position % WINDOW] = streams[place]
    return rings


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_keeps_its_last_window(kernels, dtype):
    """Prompt chunks longer than the window beside single tokens, rows at different residues."""
    harness = Harness(random_model(TINY, dtype=dtype).with_kernels(kernels), ENGINE)
    model, tables, store = harness.model, harness.tables, harness.store
    segments = [Segment(2, 0, random_ids(WINDOW + 37, 1)), Segment(0, 0, random_ids(5, 2)),
                Segment(3, 0, random_ids(2 * WINDOW + 1, 3))]  # fmt: skip
    following = [Segment(3, 2 * WINDOW + 1, [9]), Segment(0, 5, [4]), Segment(2, WINDOW + 37, [2, 3])]
    store.mtp_streams.fill_(UNTOUCHED)
    found, rings = [], store.mtp_streams.clone()
    for forward in (segments, following):
        view = store.target_view(forward, model.config.compress_ratios)
        streams = target_forward(model, tables, store, view, keeps_streams=True)
        fed = [(segment.slot, position) for segment in forward for position in range(segment.start, segment.end)]
        new = expected_rings(rings, [(*token, place) for place, token in enumerate(fed)], streams)
        rings = torch.where(new == UNTOUCHED, rings, new)
        assert torch.equal(store.mtp_streams, rings)
        found.append((store.mtp_streams != UNTOUCHED).flatten(2).any(-1).sum(1).tolist())
        store.mtp_streams.fill_(UNTOUCHED)
        target_forward(model, tables, store, view)  # keeps nothing unless asked
        assert (store.mtp_streams == UNTOUCHED).all()
        store.mtp_streams.copy_(rings)
    assert found == [[5, 0, WINDOW, WINDOW, 0, 0, 0, 0], [6, 0, WINDOW, WINDOW, 0, 0, 0, 0]]


def test_of_a_step_with_drafts_committed_tokens_are_kept():
    """Nothing of rejected drafts, whose cells hold the window's first positions, nor of a row that starts over."""
    kept = torch.full((4, WINDOW, 2, 3), UNTOUCHED)
    streams = torch.arange(9 + WINDOW + 3).view(-1, 1, 1).expand(-1, 2, 3).float()
    spans = [(1, 200, 202, 0), (3, 130, 0, 4), (0, 2 * WINDOW - 1, 2 * WINDOW + 2, 6), (2, 3, WINDOW + 6, 9)]
    keep_spans(kept, spans, streams)
    fed = [(1, 200, 0), (1, 201, 1), *((0, 2 * WINDOW - 1 + nth, 6 + nth) for nth in range(3)),
           *((2, 3 + nth, 9 + nth) for nth in range(WINDOW + 3))]  # fmt: skip
    assert torch.equal(kept, expected_rings(kept, fed, streams))
    before = kept.clone()
    keep_spans(kept, [(1, 50, 0, 0)], streams)
    assert torch.equal(kept, before)
