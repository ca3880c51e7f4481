"""Integers of the per-row state: capacities, window blocks, and refusals that name slot and numbers. No torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from polytempo.cache.layout import (
    BLOCK,
    LayerShape,
    Segment,
    StateShape,
    check_segments,
    num_entries,
    num_window_blocks,
    round_up,
)
from polytempo.config import ModelConfig, RopeConfig
from polytempo.engine_config import EngineConfig
from polytempo.errors import InvariantError

MODEL = ModelConfig(
    vocab_size=32,
    hidden_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    head_dim=16,
    qk_rope_head_dim=8,
    q_lora_rank=8,
    o_groups=2,
    o_lora_rank=8,
    n_routed_experts=2,
    num_experts_per_tok=1,
    compress_ratios=(0, 4, 128),
    rope=RopeConfig(theta=10000.0),
    compress_rope=RopeConfig(theta=160000.0),
    index_head_dim=8,
    sliding_window=16,
)
ENGINE = EngineConfig(max_rows=3, max_model_len=1000, max_chunk=12, max_step_tokens=64)


def test_layout_imports_no_torch():
    code = "import sys, polytempo.cache.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("ratio", (4, 128))
def test_num_entries_counts_finished_spans(ratio):
    for num_tokens in range(3 * 128 + 2):
        finished = [e for e in range(200) if all(p < num_tokens for p in range(e * ratio, (e + 1) * ratio))]
        assert num_entries(num_tokens, ratio) == len(finished)


def test_round_up():
    assert [round_up(n, 64) for n in (0, 1, 63, 64, 65, 128)] == [0, 64, 64, 64, 128, 128]


@pytest.mark.parametrize("window", range(1, 201))
def test_num_window_blocks_covers_every_window_and_no_more(window):
    needed = max(p // BLOCK - max(p - window + 1, 0) // BLOCK + 1 for p in range(window, window + 4 * BLOCK))
    assert num_window_blocks(window) == needed


def capacity_needed(window: int, max_chunk: int) -> int:
    """Smallest ring in which no position that a chunk reads or writes shares a cell with another one."""
    start = 1000
    live = range(start - window + 1, start + max_chunk)
    return next(n for n in range(1, 2000) if len({p % n for p in live}) == len(live))


@pytest.mark.parametrize("window", (1, 2, 16, 128))
@pytest.mark.parametrize("max_chunk", (1, 8, 12, 256))
def test_window_ring_holds_a_chunk_and_the_window_before_it(window, max_chunk):
    engine = replace(ENGINE, max_chunk=max_chunk, max_step_tokens=max(64, max_chunk))
    shape = StateShape.build(replace(MODEL, sliding_window=window), engine)
    for layer in (*shape.layers, *shape.mtp):
        assert layer.window_cells == capacity_needed(window, max_chunk)


@pytest.mark.parametrize("max_chunk", (1, 8, 12, 256))
@pytest.mark.parametrize("layer_idx, ratio, num_inputs", ((1, 4, 8), (2, 128, 128)))
def test_input_ring_holds_what_a_rewound_chunk_reads(layer_idx, ratio, num_inputs, max_chunk):
    """A chunk is written and rewound; the first entry that the next one completes reads num_inputs back."""
    engine = replace(ENGINE, max_chunk=max_chunk, max_step_tokens=max(64, max_chunk))
    cells = StateShape.build(MODEL, engine).layers[layer_idx].input_cells
    for start in range(2 * num_inputs, 4 * num_inputs):
        newest_written = start + max_chunk - 1
        first_completed = (start // ratio + 1) * ratio - 1
        oldest_read = first_completed - num_inputs + 1
        assert newest_written - oldest_read < cells
    starts = range(2 * num_inputs, 4 * num_inputs)
    assert cells == max(start + max_chunk - (start // ratio + 1) * ratio + num_inputs for start in starts)


def test_state_shape_of_each_layer_kind():
    shape = StateShape.build(MODEL, ENGINE)
    assert shape.layers == (
        LayerShape(0, 27, 0, 0, 16, 0),
        LayerShape(4, 27, 19, 256, 16, 8),
        LayerShape(128, 27, 139, 64, 16, 0),
    )
    assert shape.mtp == (LayerShape(0, 27, 0, 0, 16, 0),)
    assert StateShape.build(replace(MODEL, num_nextn_predict_layers=0, mtp_compress_ratios=()), ENGINE).mtp == ()


@pytest.mark.parametrize("max_model_len", (1, 255, 256, 257, 1000, 32768))
def test_entry_columns_cover_max_model_len_in_whole_blocks(max_model_len):
    shape = StateShape.build(MODEL, replace(ENGINE, max_model_len=max_model_len))
    for layer in shape.layers[1:]:
        assert layer.max_entries % BLOCK == 0
        assert max_model_len // layer.ratio <= layer.max_entries < max_model_len // layer.ratio + BLOCK


def test_bytes_per_row_counts_every_tensor():
    """Written out: rings of keys, two rings of inputs per compressor (twice as wide at ratio 4), and entries."""
    plain = 27 * 16
    ratio_4 = 27 * 16 + 2 * 19 * 32 + 256 * 16 + 2 * 19 * 16 + 256 * 8
    ratio_128 = 27 * 16 + 2 * 139 * 16 + 64 * 16
    shape = StateShape.build(MODEL, ENGINE)
    assert [layer.num_elements for layer in shape.layers] == [plain, ratio_4, ratio_128]
    streams = MODEL.sliding_window * MODEL.hc_mult * MODEL.hidden_size
    assert shape.bytes_per_row(2) == 2 * (plain + ratio_4 + ratio_128 + plain + streams)


def test_segment_end():
    assert Segment(1, 7, [3, 4, 5]).end == 10


@pytest.mark.parametrize("slot, start, ids, named", ((-1, 5, [1], "-1"), (4, -2, [1, 2], "-2"), (6, 9, [], "0 tokens")))
def test_impossible_segment_is_refused_with_its_numbers(slot, start, ids, named):
    with pytest.raises(InvariantError) as caught:
        Segment(slot, start, ids)
    message = str(caught.value)
    assert named in message and f"slot {slot}" in message and f"position {start}" in message


def test_forward_that_fits_is_accepted():
    full = [Segment(slot, 1000 - 12, range(12)) for slot in range(3)]
    check_segments(full, ENGINE)


@pytest.mark.parametrize(
    "segments, named",
    (
        ([], ("at least one",)),
        ([Segment(1, 0, [1]), Segment(2, 0, [1]), Segment(1, 5, [2])], ("[1]", "twice")),
        ([Segment(3, 0, [1])], ("slot 3", "max_rows is 3")),
        ([Segment(0, 0, [1]), Segment(2, 4, range(13))], ("slot 2", "13 tokens", "max_chunk (12)")),
        ([Segment(1, 995, range(6))], ("slot 1", "position 1000", "max_model_len is 1000")),
    ),
)
def test_forward_that_does_not_fit_is_refused_with_its_numbers(segments, named):
    with pytest.raises(InvariantError) as caught:
        check_segments(segments, ENGINE)
    assert all(part in str(caught.value) for part in named), str(caught.value)
