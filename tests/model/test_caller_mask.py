"""A caller's additive mask over raw keys: composed with ours at both layouts, never dropped, refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import ENGINE, TINY, Harness, random_ids, random_model, relative_difference, slot_tensors

from polytempo.cache.layout import Segment
from polytempo.errors import ConfigError
from polytempo.model.forward import target_forward

pytestmark = pytest.mark.twin  # the kernels know the ring without a caller's mask; in torch all of it is compared

HEADS = TINY.num_attention_heads
LENGTHS = (70, 131, 9)
COUNTS = (3, 1, 2)
LAYOUTS = ("ring", "left_aligned")


@pytest.fixture(scope="module")
def model():
    return random_model(seed=3)


def prefilled(model, layout: str) -> tuple[Harness, list[Segment]]:
    """Rows of LENGTHS in their slots, and segments of COUNTS more tokens each."""
    harness = Harness(model, replace(ENGINE, kv_layout=layout))
    ids = [random_ids(length + 8, seed=length) for length in LENGTHS]
    harness.streams(*(Segment(slot, 0, ids[slot][:length]) for slot, length in enumerate(LENGTHS)))
    segments = [
        Segment(slot, length, ids[slot][length : length + count])
        for slot, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True))
    ]
    return harness, segments


def forward(harness: Harness, segments, mask) -> torch.Tensor:
    return target_forward(harness.model, harness.tables, harness.store, harness.view(segments), mask)


def masks(harness: Harness, segments, seed: int = 0) -> torch.Tensor:
    """A random rank-4 mask of the forward's shape, by position: [B, H, T_q, K]."""
    view = harness.view(segments)
    generator = torch.Generator().manual_seed(seed)
    return 4 * torch.randn(len(segments), HEADS, view.most_tokens, view.num_columns, generator=generator)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zeros_change_nothing(model, layout):
    harness, segments = prefilled(model, layout)
    view = harness.view(segments)
    expected = forward(harness, segments, None)
    assert torch.equal(forward(harness, segments, torch.zeros(view.most_tokens, view.num_columns)), expected)
    moved = forward(harness, segments, masks(harness, segments))
    assert relative_difference(moved, expected) > 0.05, "the mask is dropped"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("row", range(len(LENGTHS)))
def test_a_hidden_key_is_not_read_and_others_are(model, layout, row):
    """−∞ on one position of one row: that key may hold anything; the key beside it may not."""
    harness, segments = prefilled(model, layout)
    view = harness.view(segments)
    lead = int(view.leads[row])
    hidden = LENGTHS[row] - 2
    mask = torch.zeros(len(segments), 1, view.most_tokens, view.num_columns)
    mask[row, :, :, hidden + lead] = -torch.inf
    expected = forward(harness, segments, mask)
    assert relative_difference(expected, forward(harness, segments, None)) > 1e-4
    for position, is_read in ((hidden, False), (hidden - 1, True)):
        cell = harness.store.target_windows.cells(torch.tensor([row]).numpy(), torch.tensor([position]).numpy())[0]
        for layer in harness.store.layers:
            layer.window[row, cell] += 3.0
        got = forward(harness, segments, mask)
        assert torch.equal(got, expected) is not is_read


def test_both_layouts_compose_the_same_mask(model):
    """By position at ring, by position + lead at left_aligned: the same logits."""
    results = []
    for layout in LAYOUTS:
        harness, segments = prefilled(model, layout)
        mask = masks(*prefilled(model, "ring"))
        view = harness.view(segments)
        if layout == "left_aligned":
            assert len(set(view.leads.tolist())) == 3
            mask = torch.stack([part.roll(int(lead), -1) for part, lead in zip(mask, view.leads, strict=True)])
        results.append(forward(harness, segments, mask))
    assert relative_difference(*results) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_queries_end_together_and_rows_and_heads_have_their_own(model, layout):
    """A row's slice of the mask alone, given to the row alone, has the same effect."""
    harness, segments = prefilled(model, layout)
    mask = masks(harness, segments)
    together = forward(harness, segments, mask).split(list(COUNTS))
    leads = harness.view(segments).leads.tolist()
    for row, segment in enumerate(segments):
        part = mask[row : row + 1, :, -COUNTS[row] :, leads[row] : leads[row] + segment.end]
        assert relative_difference(forward(harness, [segment], part), together[row]) < 1e-5
    swapped = mask.flip(1)
    assert relative_difference(forward(harness, segments, swapped), torch.cat(together)) > 1e-2, "heads share a mask"


def test_rank_2_is_every_row_and_head(model):
    harness, segments = prefilled(model, "ring")
    mask = masks(harness, segments)[0, 0]
    wide = mask.expand(len(segments), HEADS, *mask.shape)
    assert torch.equal(forward(harness, segments, mask), forward(harness, segments, wide))


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ((3, 130), r"K \(columns of raw keys\) is 130; it must be 132"),
        ((2, 132), r"T_q \(tokens of the widest segment\) is 2; it must be 3"),
        ((2, 1, 3, 132), r"B \(rows\) is 2; it must be 1 or 3"),
        ((3, 3, 3, 132), r"H \(heads\) is 3; it must be 1 or 4"),
        ((3, 3, 132), "rank 3"),
        ((132,), "rank 1"),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrong_sizes_are_refused_by_name(model, layout, shape, named):
    harness, segments = prefilled(model, layout)
    before = [tensor.clone() for tensor in slot_tensors(harness.store)]
    with pytest.raises(ConfigError, match=named):
        forward(harness, segments, torch.zeros(shape))
    assert all(map(torch.equal, before, slot_tensors(harness.store))), "a refused forward wrote state"


def test_a_boolean_mask_is_refused(model):
    harness, segments = prefilled(model, "ring")
    with pytest.raises(ConfigError, match="torch.bool"):
        forward(harness, segments, torch.zeros(3, 132, dtype=torch.bool))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ours_still_holds_under_a_mask_that_favours_the_future(model, layout):
    """A large bias on what is dead, in the future or outside the window raises nothing."""
    harness, segments = prefilled(model, layout)
    view = harness.view(segments)
    mask = torch.zeros(len(segments), 1, view.most_tokens, view.num_columns)
    for row, (segment, lead) in enumerate(zip(segments, view.leads.tolist(), strict=True)):
        for place in range(len(segment.token_ids)):
            query = segment.start + place
            position = torch.arange(view.num_columns) - lead
            invisible = (position < 0) | (position > query) | (position <= query - TINY.sliding_window)
            mask[row, 0, view.most_tokens - len(segment.token_ids) + place, invisible] = 1e4
    assert torch.equal(forward(harness, segments, mask), forward(harness, segments, None))
