"""The probe of row invariance: clean at tiny shapes here, and not blind to a kernel that depends on its rows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from support import TINY, Harness, random_ids, random_model

from polytempo import invariance, invariance_probes
from polytempo.cache.layout import Segment
from polytempo.model import attention, compressor, hyper, moe, ops

SHAPES = replace(TINY, index_n_heads=2)
"""index_n_heads 2 gives bfloat16 a product so small that it needs many padding rows."""


@pytest.fixture(scope="module")
def verdicts():
    return invariance.run_probes(SHAPES, list(invariance.DTYPES.values()), quiet=True)


def failed(verdicts) -> set[tuple]:
    return {(v.probe.op, v.probe.shape, v.probe.dtype) for v in verdicts if v.ours}


def test_every_form_that_is_used_is_clean(verdicts):
    assert len(verdicts) > 40
    assert not failed(verdicts)
    kinds = {verdict.probe.op.split()[0] for verdict in verdicts}
    assert kinds >= {"linear", "matmul", "RMSNorm", "sum", "exp", "log1p", "sqrt", "rsqrt", "topk", "sort", "argmax"}
    assert {verdict.probe.dtype for verdict in verdicts} == {torch.float32, torch.bfloat16}


@pytest.mark.twin
def test_every_linear_of_a_forward_is_probed(monkeypatch):
    """Shapes that the target and the MTP block really show `linear`, against the ones that are probed."""
    seen = set()

    def spy(x, weight, original=ops.linear):
        seen.add((weight.shape[1], weight.shape[0], weight.dtype))
        return original(x, weight)

    for module in (ops, hyper, moe):
        monkeypatch.setattr(module, "linear", spy)
    model, ids = random_model(TINY, seed=3, dtype=torch.bfloat16), random_ids(140, seed=0)
    harness = Harness(model)
    streams = harness.streams(Segment(0, 0, ids[:-1]))[0]
    harness.mtp(streams, Segment(0, 0, ids[1:]))
    model.logits(streams)
    assert seen == set(invariance_probes.weight_shapes(TINY, torch.bfloat16))


@pytest.mark.twin
def test_every_product_of_a_forward_has_a_probe(monkeypatch):
    """Inner dimensions and dtypes that `matmul` really meets."""
    seen = set()

    def spy(a, b, original=ops.matmul):
        seen.add((a.shape[2], b.shape[2] % 64 and b.shape[2], a.dtype))
        return original(a, b)

    for module in (attention, compressor, ops):
        monkeypatch.setattr(module, "matmul", spy)
    monkeypatch.setattr("polytempo.model.cached_attention.matmul", spy)
    Harness(random_model(TINY, seed=3)).prefill(random_ids(140, seed=0), [139, 1])
    used = set(seen)
    seen.clear()
    for probe in invariance_probes.product_probes(TINY, torch.float32):
        probe.ours(0, 2)
    assert used == seen and len(used) == 4


def test_fewer_padding_rows_are_noticed(verdicts, monkeypatch):
    """Without padding, a linear fails wherever this machine's raw kernel does."""
    raw = {(v.probe.op, v.probe.shape, v.probe.dtype) for v in verdicts if v.raw and v.probe.op.startswith("linear")}
    if not raw:
        pytest.skip("this machine's kernels are row-invariant without padding")
    monkeypatch.setattr(ops, "FP32_MIN_ROWS", 1)
    monkeypatch.setattr(ops, "BF16_MIN_ROWS", 1)
    monkeypatch.setattr(ops, "BF16_MAX_SMALL_WORK", 0)
    bare = invariance.run_probes(SHAPES, list(invariance.DTYPES.values()), quiet=True)
    assert {key for key in failed(bare) if key[0].startswith("linear")} == raw


def test_command_line_fails_when_a_used_form_depends_on_its_rows(monkeypatch, capsys):
    monkeypatch.setattr(invariance, "DEFAULT_SHAPE", SHAPES)
    threads = torch.get_num_threads()
    try:
        assert invariance.main(["--dtype", "float32", "--threads", "1"]) == 0
        clean = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert clean["failed"] == [] and clean["threads"] == 1

        def planted(x, dim, original=ops.tree_sum):
            return original(x, dim) + (1e-6 if x.shape[0] == 17 else 0.0)

        monkeypatch.setattr(ops, "tree_sum", planted)
        assert invariance.main(["--dtype", "float32"]) == 1
    finally:
        torch.set_num_threads(threads)
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(json.loads(last)["failed"]) == 3
    assert sum("differs at 17" in line for line in lines) == 3


def test_command_line_reads_a_checkpoint_config(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        invariance.main(["--model", str(tmp_path)])
    assert caught.value.code == 2 and "config.json" in capsys.readouterr().err
