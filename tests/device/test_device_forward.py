"""The forwards keep to one device and never make the host wait for it, as far as can be seen without one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_cuda import DEVICE, Refusals, fake_cuda, shape_only_experts
from support import ENGINE, with_ratios
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from polytempo.cache.fork import copy_slot, paste_slot
from polytempo.cache.layout import Segment, StateShape
from polytempo.cache.snapshot import SPAN, restore_snapshot, take_snapshot
from polytempo.cache.store import RowStore
from polytempo.checkpoint.packed import build_packed
from polytempo.checkpoint.reader import read_checkpoint
from polytempo.device import to_device, upload
from polytempo.llm import DEMO_MODEL
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.forward import mtp_catch_up, mtp_write, target_forward
from polytempo.model.moe import Experts
from polytempo.model.packed import Packed
from polytempo.model.rope import RopeTables

SMALL = with_ratios(0, 4, 128, hc_sinkhorn_iters=2)
UPLOADS, UPLOADS_PER_WIDTH = 3, 2
"""Transfers of one forward: tokens and block tables, window cells, completed entries; and of each width of tile its
indices and its mask."""


@pytest.fixture(autouse=True)
def experts(monkeypatch):
    monkeypatch.setattr(Experts, "forward", shape_only_experts)


class FakeRows:
    """Weights and state on the device; what is run is fake."""

    def __init__(self, dtype: torch.dtype = torch.float32, **options) -> None:
        engine = replace(ENGINE, **options)
        self.model = DeepseekV4(SMALL, dtype, DEVICE).requires_grad_(False).with_kernels("torch")
        self.config = SMALL
        self.tables = RopeTables.build(self.config, engine.max_model_len, DEVICE)
        self.store = RowStore.allocate(StateShape.build(self.config, engine), engine.max_rows, dtype, DEVICE)

    def target(self, *segments: Segment, caller_mask: torch.Tensor | None = None) -> torch.Tensor:
        view = self.store.target_view(segments, self.config.compress_ratios)
        return target_forward(self.model, self.tables, self.store, view, caller_mask)


def prompt(slot: int, start: int, count: int) -> Segment:
    return Segment(slot, start, [token % SMALL.vocab_size for token in range(count)])


@pytest.mark.parametrize("segments, dtype", [
    ([prompt(0, 0, 300)], torch.float32),
    ([prompt(0, 299, 1)], torch.bfloat16),
    ([prompt(slot, 299, 1) for slot in range(8)], torch.float32),
    ([prompt(0, 299, 1), prompt(1, 126, 4), prompt(2, 0, 130), prompt(3, 7, 2)], torch.bfloat16),
], ids=["more entries than the indexer keeps", "one token", "uniform", "verifies, single tokens, a chunk"])  # fmt: skip
def test_a_target_forward_never_waits(segments, dtype):
    with fake_cuda():
        rows = FakeRows(dtype)
        with Refusals():
            rows.target(*segments)  # hands out the blocks
        with Refusals() as refusals:
            streams = rows.target(*segments)
            logits = rows.model.logits(streams)
        num_tokens = sum(len(segment.token_ids) for segment in segments)
        assert streams.shape == (num_tokens, SMALL.hc_mult, SMALL.hidden_size) and streams.device == DEVICE
        assert logits.shape == (num_tokens, SMALL.vocab_size) and logits.device == DEVICE
        view = rows.store.target_view(segments, SMALL.compress_ratios)
        assert refusals.num_uploads == UPLOADS + UPLOADS_PER_WIDTH * len(view.groups)


def test_left_aligned_rows_and_a_caller_s_mask_stay_on_the_device():
    with fake_cuda():
        rows = FakeRows(kv_layout="left_aligned")
        with Refusals():
            rows.target(prompt(0, 0, 40), prompt(1, 0, 33))
            rows.target(prompt(0, 40, 2), prompt(1, 33, 1), caller_mask=torch.zeros(2, 42, device=DEVICE))


def test_the_mtp_block_never_makes_the_host_wait():
    with fake_cuda():
        rows = FakeRows(torch.bfloat16)
        with Refusals():
            streams = rows.target(prompt(0, 0, 20), prompt(1, 0, 9))
        with Refusals() as refusals:
            written, queried = [prompt(0, 0, 19), prompt(1, 0, 8)], [prompt(0, 19, 1), prompt(1, 8, 1)]
            order = [*range(19), *range(20, 28), 19, 28]
            out = mtp_catch_up(rows.model, rows.tables, rows.store, written, queried, streams, order)
            logits = rows.model.mtp_logits(out)
            mtp_write(rows.model, rows.tables, rows.store, rows.store.mtp_view(written), streams[:27])
        assert out.shape == (2, SMALL.hc_mult, SMALL.hidden_size) and logits.shape == (2, SMALL.vocab_size)
        assert out.device == logits.device == DEVICE
        # Which streams; tokens and cells of the written pairs, twice; of the others, tiles and masks too.
        assert refusals.num_uploads == 1 + 2 * 2 + 4


def test_snapshots_and_forks_index_on_the_device():
    with fake_cuda():
        rows = FakeRows()
        num_ratios = len(rows.store.pool.ratios)
        assert sum(len(layer.pooled) for layer in (*rows.store.layers, *rows.store.mtp)) > num_ratios == 2
        with Refusals():
            streams = rows.target(prompt(0, 0, 2 * SPAN + 5))
        with Refusals() as refusals:
            chain = [take_snapshot(rows.store, 0, boundary, streams[boundary - 1]) for boundary in (SPAN, 2 * SPAN)]
        assert refusals.num_uploads == len(chain) * num_ratios, "where entries lie, by ratio"
        with Refusals() as refusals:
            restore_snapshot(rows.store, 1, chain)
        assert refusals.num_uploads == 2 * num_ratios, "new blocks, and where entries lie, by ratio"
        with Refusals() as refusals:
            copied = copy_slot(rows.store, 0, 2 * SPAN + 5)
        assert refusals.num_uploads == num_ratios, "blocks, by ratio"
        with Refusals() as refusals:
            paste_slot(rows.store, 2, copied)
        assert refusals.num_uploads == 2 * num_ratios, "new blocks, and blocks, by ratio"
        with Refusals():
            rows.store.clear(0)
        tensors = [tensor for layer in chain[0].layers for tensor in (layer.window, *layer.inputs, *layer.entries)]
        assert len(tensors) > 4 and all(tensor.device == DEVICE for tensor in tensors)


def test_packed_weights_are_expanded_on_the_device():
    stored = build_packed(read_checkpoint(DEMO_MODEL), torch.bfloat16, "meta").modules()
    by_form = {(module.kind, module.codes.dim()): module for module in stored if isinstance(module, Packed)}
    assert len(by_form) == 2, "one matrix in fp8 and one stack in fp4"
    with fake_cuda(), torch.inference_mode(), Refusals():
        for like in by_form.values():
            codes = torch.empty(like.codes.shape, dtype=torch.uint8, device=DEVICE)
            scales = torch.empty(like.scales.shape, dtype=torch.uint8, device=DEVICE)
            packed = Packed(codes, scales, like.kind, torch.bfloat16, like._expand)
            weight = packed.expand() if codes.dim() == 2 else packed[1]
            assert weight.device == DEVICE and weight.dtype == torch.bfloat16 and weight.dim() == 2


# --- that these tests could fail ------------------------------------------------------------------------------


@pytest.mark.parametrize("wait, error", [
    (lambda x: x.tolist(), DataDependentOutputException),
    (lambda x: x[0, 0].item(), DataDependentOutputException),
    (lambda x: bool((x > 0).all()), DataDependentOutputException),
    (lambda x: x.nonzero(), DynamicOutputShapeException),
    (lambda x: x[x > 0], DynamicOutputShapeException),
    (lambda x: x.cpu(), AssertionError),
    (lambda x: x[torch.tensor([1])], AssertionError),
    (lambda x: x.__setitem__(torch.tensor([1]), 0.0), AssertionError),
    (lambda x: x.__setitem__(x > 0, torch.zeros(2, device=DEVICE)), AssertionError),
    (lambda x: x.index_select(0, torch.tensor([1])), (AssertionError, RuntimeError)),
    (lambda x: x + torch.ones(3), (AssertionError, RuntimeError)),
    (lambda x: torch.tensor([1, 2], device=DEVICE), AssertionError),
    (lambda x: torch.ones(3).to(DEVICE), AssertionError),
    (lambda x: x[0].bincount(minlength=2), DynamicOutputShapeException),
])  # fmt: skip
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_waits_or_mixes_devices_is_seen(wait, error, mode):
    with fake_cuda(), mode():
        x = torch.empty(4, 3, dtype=torch.int64, device=DEVICE)
        with Refusals(), pytest.raises(error):
            wait(x)


def test_uploads_are_counted_and_packed():
    with fake_cuda(), torch.inference_mode(), Refusals() as refusals:
        assert to_device([1, 2, 3], DEVICE).device == DEVICE and refusals.num_uploads == 1
        parts = upload([np.arange(6).reshape(2, 3), np.arange(0), np.arange(1)], DEVICE)
        assert [tuple(part.shape) for part in parts] == [(2, 3), (0,), (1,)] and refusals.num_uploads == 2
        assert all(part.device == DEVICE and part.dtype == torch.int64 for part in parts)
