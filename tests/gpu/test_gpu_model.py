"""The forward on a device: against transformers on the same device, and one row's against its own in other company."""

from __future__ import annotations

import pytest
import torch
from support import TINY, Harness, ids_with_clear_choices, random_ids, relative_difference, transformers_model

from polytempo.cache.layout import Segment
from polytempo.model.native_probes import forward_probes

LENGTHS = (9, 132)


def test_logits_equal_those_of_transformers_on_the_same_device(device, model_on):
    model = model_on(3, torch.float32)
    reference = transformers_model(model).to(device)
    for length in LENGTHS:
        ids = ids_with_clear_choices(model, length)
        with torch.no_grad():
            theirs = reference(torch.tensor([ids], device=device), use_cache=False).logits[0]
        ours = Harness(model).prefill(ids, [length])
        assert ours.device == theirs.device == device and theirs.std() > 0.5
        assert relative_difference(ours, theirs) <= 1e-4, f"{length} tokens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_do_not_depend_on_neighbours_seats_or_chunks(device, model_on, dtype):
    model = model_on(5, dtype)
    ids = [random_ids(length, seed=length) for length in (70, 131, 134)]
    alone = [Harness(model).prefill(one, [len(one)]) for one in ids]
    together = Harness(model)
    chunks = [together.logits(*(Segment(7 - slot, 0, one[:60]) for slot, one in enumerate(ids)))]
    chunks.append(together.logits(*(Segment(7 - slot, 60, one[60:-2]) for slot, one in enumerate(ids))))
    for last in (2, 1):
        tokens = [(slot, one, len(one) - last) for slot, one in enumerate(ids)]
        chunks.append(together.logits(*(Segment(7 - slot, at, one[at : at + 1]) for slot, one, at in tokens)))
    for slot, expected in enumerate(alone):
        found = torch.cat([chunk[slot] for chunk in chunks])
        assert expected.std() > 0.5 and torch.equal(found, expected), f"row {slot}: not bit-identical"


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16])
def test_whole_forwards_are_probed_on_the_device(device, dtype):
    """What `python -m polytempo.invariance --device` asks of a whole forward, in a small model."""
    torch.manual_seed(0)
    with torch.inference_mode(), device:
        found = {probe.op: probe for probe in forward_probes(TINY, dtype, device, kernels="auto")}
        assert list(found) == ["forward by rows", "forward by chunk"]
        for probe in found.values():
            together = probe.form(0, probe.num_rows)
            assert together.device == device and together.std() > 0.1
            for first, count in ((0, 1), (3, 2), (1, 33)):
                assert torch.equal(probe.form(first, count), together[first : first + count]), (probe.op, first, count)
