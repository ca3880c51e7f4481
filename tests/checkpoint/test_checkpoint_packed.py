"""Weights kept packed: the same numbers as expanded ones, in the checkpoint's own room, or a named refusal."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import (
    export_tiny,
    random_model,
    read_tensors,
    store_one_expert_unquantised,
    tiny_config,
    write_tensors,
)

from polytempo import LLM, SamplingParams
from polytempo.cache.layout import Segment, StateShape
from polytempo.cache.store import RowStore
from polytempo.checkpoint.export import export_model
from polytempo.checkpoint.load import load_model
from polytempo.engine_config import EngineConfig
from polytempo.errors import CheckpointError, ConfigError
from polytempo.model.forward import mtp_forward, target_forward
from polytempo.model.packed import Packed, PackedLinear
from polytempo.model.rope import RopeTables

DTYPES = ("float32", "bfloat16")
ROWS = (1, 3, 17, 128)
MAX_LEN = 40
# Ragged blocks of scales everywhere: experts' parts of 160 rows, wo_a's second group at row 96 of blocks of 128.
RAGGED = {"moe_intermediate_size": 160, "o_lora_rank": 96, "q_lora_rank": 160, "index_topk": 2}


def uneven_model(**changes):
    """A model in which each row of a weight, and each 32 columns, has a magnitude of its own."""
    model = random_model(tiny_config(**{**RAGGED, **changes}), torch.bfloat16)
    for name, value in model.state_dict().items():
        if value.dim() >= 2 and value.dtype == torch.bfloat16 and "embed" not in name:
            rows, columns = torch.arange(value.shape[-2]) // 32, torch.arange(value.shape[-1]) // 32
            value.mul_(2.0 ** ((3 * rows.unsqueeze(1) + 2 * columns) % 7 - 3.0))
    return model


@pytest.fixture(scope="module", params=["fp8-fp4", "fp8"])
def folder(request, tmp_path_factory):
    return export_model(uneven_model(), tmp_path_factory.mktemp("packed") / "model", quantise=request.param)


def both(folder: Path, dtype: str = "bfloat16"):
    """The same checkpoint expanded and packed."""
    return [load_model(folder, dtype, weights=weights)[0] for weights in ("expanded", "packed")]


def held_bytes(model) -> int:
    """Bytes of every tensor that a model holds."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def steps(model, rows: int) -> list[torch.Tensor]:
    """Logits of a prompt chunk and of the next token of `rows` rows, then the MTP block's."""
    limits = EngineConfig(max_rows=rows, max_model_len=MAX_LEN, max_step_tokens=rows * MAX_LEN)
    tables = RopeTables.build(model.config, MAX_LEN)
    store = RowStore.allocate(StateShape.build(model.config, limits), rows, model.dtype)
    for slot in range(rows):
        store.pool.reserve(slot, MAX_LEN)
    store.fit()
    ids = torch.randint(2, 48, (rows, 20), generator=torch.Generator().manual_seed(0)).tolist()
    found, streams = [], None
    for start, end in ((0, 18), (18, 19)):
        segments = [Segment(row, start, ids[row][start:end]) for row in range(rows)]
        streams = target_forward(model, tables, store, store.target_view(segments, model.config.compress_ratios))
        found.append(model.logits(streams))
    nexts = [Segment(row, 18, ids[row][19:20]) for row in range(rows)]
    found.append(model.mtp_logits(mtp_forward(model, tables, store, store.mtp_view(nexts), streams)))
    return found


def test_every_quantised_weight_is_packed_and_reads_as_if_expanded(folder):
    for dtype in DTYPES:
        expanded, packed = both(folder, dtype)
        count = 0
        for path, module in packed.named_modules():
            if isinstance(module, PackedLinear):
                assert torch.equal(module.weight, expanded.get_submodule(path).weight), path
                count += 1
            elif isinstance(module, Packed) and not path.endswith("stored"):
                stack = dict(expanded.named_parameters())[path]
                assert len(module) == len(stack)
                for expert, values in enumerate(stack):
                    assert torch.equal(module[expert], values), (path, expert)
                    count += 1
        scales = sum(name.endswith(".scale") for name in read_tensors(folder))
        # w1 and w3 of an expert are one matrix in memory.
        assert count == scales - 5 * packed.config.n_routed_experts and count > 40
        assert packed.dtype == expanded.dtype and not packed.training
        kept = {name: value for name, value in packed.state_dict().items() if "codes" not in name}
        kept = {name: value for name, value in kept.items() if "scales" not in name}
        assert kept and all(torch.equal(value, expanded.state_dict()[name]) for name, value in kept.items())


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_have_the_same_bits(folder, dtype, kernels):
    expanded, packed = (model.with_kernels(kernels) for model in both(folder, dtype))
    assert (packed.native is None) == (kernels == "torch")
    for rows in ROWS if kernels == "native" else (1, 3):
        for ours, theirs in zip(steps(packed, rows), steps(expanded, rows), strict=True):
            assert torch.equal(ours, theirs), rows
            assert theirs.isfinite().all() and theirs.float().std() > 0.1


def test_groups_that_begin_amid_four_rows(tmp_path):
    """The second group of wo_a begins at row 130: its rows 124 to 127 have two blocks of scales between them."""
    model = uneven_model(o_lora_rank=130)
    assert model.config.o_groups == 2
    folder = export_model(model, tmp_path / "model", quantise="fp8")
    expanded, packed = (model.with_kernels("native") for model in both(folder))
    for ours, theirs in zip(steps(packed, 3), steps(expanded, 3), strict=True):
        assert torch.equal(ours, theirs)


def test_every_scale_counts(folder):
    """The fixture is not degenerate: each packed weight's scales move the logits."""
    packed = both(folder)[1].with_kernels("native")
    before = steps(packed, 17)
    stored = {path: module for path, module in packed.named_modules() if isinstance(module, Packed)}
    for path, module in stored.items():
        kept = module.scales.clone()
        module.scales[..., 0] += 3  # not all: queries and keys are normalised
        assert any(not torch.equal(a, b) for a, b in zip(steps(packed, 17), before, strict=True)), path
        module.scales.copy_(kept)


@pytest.mark.parametrize("options", [{}, {"kernels": "torch"}, {"kv_layout": "left_aligned"}], ids=str)
def test_tokens_and_logprobs_are_the_same(folder, options):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    prompts = [[2 + (5 * row + place) % 40 for place in range(4 + row)] for row in range(3)]
    outputs = []
    for weights in ("expanded", "packed", "auto"):
        limits = {"max_rows": 3, "max_model_len": 64, "draft_len": 2, "progress": False}
        llm = LLM(folder, "bfloat16", weights=weights, **limits, **options)
        outputs.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(prompts, params, False)])
    assert outputs[0] == outputs[1] == outputs[2] and len({tuple(ids) for ids, _ in outputs[0]}) > 1


def test_tensors_take_the_checkpoint_s_room(tmp_path):
    folder = export_model(uneven_model(vocab_size=64, n_routed_experts=64), tmp_path / "model", quantise="fp8-fp4")
    on_disk = sum(value.nbytes for value in read_tensors(folder).values())
    expanded, packed = both(folder)
    assert held_bytes(packed) <= 1.15 * on_disk < 0.5 * held_bytes(expanded)


MEASURE = """
import sys
from pathlib import Path
from polytempo.checkpoint.load import load_model

def resident(field):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field))
    return int(line.split()[1]) * 1024

load_model(sys.argv[1], weights="packed", progress=False)  # what loading itself needs once
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
model, _ = load_model(sys.argv[2], weights="packed", progress=False)
print(resident("VmRSS") - before, resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of resident memory")
def test_resident_memory_grows_by_the_checkpoint_and_peaks_little_above(tmp_path):
    small = export_tiny(tmp_path / "small")
    sizes = {"vocab_size": 64, "hidden_size": 1024, "moe_intermediate_size": 512, "n_routed_experts": 16}
    large = export_model(random_model(tiny_config(**sizes), torch.bfloat16), tmp_path / "large", quantise="fp8-fp4")
    on_disk = (large / "model.safetensors").stat().st_size
    assert on_disk > 40 * 2**20
    done = subprocess.run([sys.executable, "-c", MEASURE, small, large], check=True, capture_output=True, text=True)
    grown, peak = map(int, done.stdout.split())
    assert 0.9 * on_disk < grown <= 1.15 * on_disk
    assert peak <= 1.2 * on_disk


def test_scales_in_other_shards_are_found(tmp_path):
    folder = export_tiny(tmp_path / "model")
    expected = load_model(folder, weights="packed")[0].state_dict()
    tensors = read_tensors(folder)
    file_of = {name: f"shard-{7 - idx * 5 % 8}.safetensors" for idx, name in enumerate(sorted(tensors))}
    write_tensors(folder, tensors, file_of)
    found = load_model(folder, weights="packed")[0].state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("to", ["official", "huggingface"])
def test_a_checkpoint_with_nothing_packed_is_refused(tmp_path, to):
    folder = export_model(random_model(dtype=torch.bfloat16), tmp_path / "model", to=to)
    with pytest.raises(ConfigError, match="'weights' is 'packed', but .*BF16.*'expanded'"):
        load_model(folder, weights="packed")


@pytest.mark.usefixtures("no_model")
def test_an_unknown_way_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'weights'.*'pakced'; did you mean 'packed'"):
        load_model(tmp_path / "nowhere", weights="pakced")


@pytest.mark.usefixtures("no_model")
def test_experts_stored_in_two_ways_are_refused(tmp_path):
    folder = export_tiny(tmp_path / "model")
    name = store_one_expert_unquantised(folder, tmp_path / "plain")
    with pytest.raises(CheckpointError, match=f"{name}.weight.*'expanded'"):
        load_model(folder, weights="packed")


@pytest.mark.parametrize(
    ("leaf", "byte", "said"), [("scale", 0xFF, "NaN"), ("scale", 254, "finite"), ("weight", 0x7F, "finite")]
)
@pytest.mark.parametrize("stem", ["layers.1.attn.wq_a", "layers.1.ffn.experts.2.w1"])
def test_what_is_not_finite_is_refused(tmp_path, stem, leaf, byte, said):
    folder = export_tiny(tmp_path / "model")
    tensors = read_tensors(folder)
    tensors[f"{stem}.{leaf}"].view(torch.uint8)[-1, -1] = byte
    write_tensors(folder, tensors)
    if "experts" in stem and leaf == "weight":  # every fp4 code is a number
        load_model(folder, weights="packed")
        return
    with pytest.raises(CheckpointError, match=f"{stem}.*{said}"):
        load_model(folder, weights="packed")


def test_a_file_cut_short_while_it_is_read_is_named(tmp_path, monkeypatch):
    from polytempo.checkpoint import load

    folder = export_tiny(tmp_path / "model")
    checkpoint = load.read_checkpoint(folder)
    monkeypatch.setattr(load, "read_checkpoint", lambda *args: checkpoint)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors.*cut short"):
        load_model(folder, weights="packed")


def test_export_of_a_packed_model_is_refused(tmp_path):
    packed = load_model(export_tiny(tmp_path / "model"), weights="packed")[0]
    with pytest.raises(ConfigError, match="packed.*weights='expanded'"):
        export_model(packed, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_cast_touches_no_code_and_a_copy_is_its_own(folder):
    packed = both(folder)[1]
    codes = {name: value.clone() for name, value in packed.state_dict().items() if value.dtype == torch.uint8}
    other = copy.deepcopy(packed)
    other.to(torch.float32)
    assert codes and all(torch.equal(other.state_dict()[name], value) for name, value in codes.items())
    loaded = both(folder, "float32")[1]
    for path, module in other.named_modules():
        if isinstance(module, Packed):
            assert module.dtype == torch.float32 and torch.equal(module.expand(), loaded.get_submodule(path).expand())
    other.layers[0].attn.wq_a.stored.codes.zero_()
    assert torch.equal(packed.layers[0].attn.wq_a.stored.codes, codes["layers.0.attn.wq_a.stored.codes"])
