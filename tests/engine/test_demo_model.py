"""The shipped demo model: its form on disk, text options on real text, and transformers on its export."""

import json

import pytest
import torch
from safetensors import safe_open

from polytempo.checkpoint.export import export_model
from polytempo.checkpoint.load import load_model
from polytempo.config import ModelConfig
from polytempo.llm import DEMO_MODEL, LLM
from polytempo.types import FinishReason, SamplingParams

PROMPTS = ("import os\n\n\ndef ", "class Reader:\n    def __init__(self, ", "# ", "for name in sorted(", '"""')
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return LLM(dtype="float32", max_rows=6, max_model_len=1024, progress=False)


def test_form_on_disk():
    """Real V4 shape in the official format, small enough to ship."""
    files = [path for path in DEMO_MODEL.iterdir() if path.suffix == ".safetensors"]
    assert sum(path.stat().st_size for path in DEMO_MODEL.iterdir()) <= 40 * 2**20
    raw = json.loads((DEMO_MODEL / "config.json").read_text())
    config = ModelConfig.from_dict(raw)
    assert set(config.compress_ratios) == {0, 4, 128} and raw["compress_ratios"][-1] == 0
    assert len(raw["compress_ratios"]) == config.num_hidden_layers + 1
    assert (config.sliding_window, config.qk_rope_head_dim) == (128, 64)
    assert (config.head_dim, config.index_head_dim) == (512, 128)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.index_topk) == (64, 6, 64)
    assert raw["topk_method"] == "noaux_tc" and raw["torch_dtype"] == "bfloat16" and config.num_hash_layers >= 1
    dtypes = {}
    for path in files:
        with safe_open(path, "pt") as file:
            dtypes.update({name: file.get_slice(name).get_dtype() for name in file.keys()})  # noqa: SIM118
    for name, dtype in {
        "layers.2.ffn.experts.5.w1.weight": "I8", "layers.2.ffn.experts.5.w1.scale": "F8_E8M0",
        "layers.2.attn.wq_a.weight": "F8_E4M3", "layers.2.attn.wq_a.scale": "F8_E8M0",
        "layers.0.ffn.gate.tid2eid": "I64", "layers.2.hc_attn_fn": "F32", "layers.2.attn.compressor.ape": "F32",
        "layers.2.attn.attn_sink": "F32", "layers.2.ffn.gate.bias": "F32", "mtp.0.e_proj.weight": "F8_E4M3",
        "embed.weight": "BF16", "layers.2.attn_norm.weight": "BF16", "mtp.0.hc_head_fn": "F32",
    }.items():  # fmt: skip
        assert dtypes[name] == dtype, name


def test_hash_table_is_balanced(llm):
    """Every expert is named equally often, to within the remainder, and never twice for one token."""
    table = llm.model.layers[0].ffn.gate.tid2eid
    assert all(len(set(row)) == len(row) for row in table.tolist())
    counts = table.flatten().bincount(minlength=64).float()
    assert counts.min() > 0.9 * counts.mean() and counts.max() < 1.1 * counts.mean()


def test_text_batch_equals_alone(llm):
    together = llm.generate(PROMPTS, GREEDY, progress=False)
    for prompt, output in zip(PROMPTS, together, strict=True):
        alone = llm.generate(prompt, GREEDY, progress=False)[0]
        assert alone.outputs[0].text == output.outputs[0].text
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert output.prompt_token_ids[0] == llm.model.config.bos_token_id


def test_stop_string_cuts_text_and_tokens(llm):
    """Text ends before the stop; token ids end with the token that completed it."""
    free = llm.generate(PROMPTS[0], GREEDY, progress=False)[0].outputs[0]
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 2]
    begin = free.text.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, stop=[stop])
    cut = llm.generate(PROMPTS[0], params, progress=False)[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (free.text[:begin], FinishReason.STOP, stop)
    assert 0 < len(cut.token_ids) < 32 and free.token_ids[: len(cut.token_ids)] == cut.token_ids
    assert stop in llm.tokenizer.decode(cut.token_ids) and stop not in llm.tokenizer.decode(cut.token_ids[:-1])


def test_bad_words_and_streaming(llm):
    free = llm.generate(PROMPTS[1], GREEDY, progress=False)[0].outputs[0]
    word = llm.tokenizer.decode([free.token_ids[0]])
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, bad_words=[word])
    assert llm.generate(PROMPTS[1], params, progress=False)[0].outputs[0].token_ids[0] != free.token_ids[0]
    pieces = list(llm.stream(PROMPTS[1], GREEDY))
    assert "".join(pieces) == free.text and len(pieces) > 4


def test_streams_that_advance_in_turn_lose_nothing(llm):
    """Each one's steps bring the other's text too; the last piece came after the row had ended."""
    alone = ["".join(llm.stream(prompt, GREEDY)) for prompt in PROMPTS[:2]]
    streams, texts = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]], ["", ""]
    for _ in range(40):
        for place, stream in enumerate(streams):
            texts[place] += next(stream, "")
    assert texts == alone
    stream = llm.stream(PROMPTS[0], GREEDY)
    begin = next(stream)
    llm.generate(PROMPTS[1], GREEDY, progress=False)
    assert begin + "".join(stream) == alone[0]


def test_chat_uses_the_template(llm):
    messages = [{"role": "user", "content": "def add(a, b):"}]
    output = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=4), progress=False)[0]
    names = [llm.tokenizer.token_of(i) for i in output.prompt_token_ids]
    assert names[0] == "<|bos|>" and names[1] == "<|user|>" and names[-1] == "<|assistant|>"
    assert len(llm.chat([messages, messages], SamplingParams(max_tokens=1), progress=False)) == 2


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    transformers = pytest.importorskip("transformers", reason="the release with DeepSeek-V4 needs Python 3.11")
    out = tmp_path_factory.mktemp("export") / "huggingface"
    export_model(load_model(DEMO_MODEL, "float32", progress=False)[0], out, to="huggingface")
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(out, **options).eval()


def test_transformers_gives_the_same_greedy_tokens(llm, reference):
    """Except where transformers' own top-2 gap is below the difference of the two computations."""
    held = llm.generate(PROMPTS, GREEDY, progress=False)
    for output in held:
        prompt, ours = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + ours[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
        top = logits.topk(2).values
        noise = 1e-4 * float(logits.max() - logits.min())
        clear = (top[:, 0] - top[:, 1]) > noise
        assert clear.float().mean() > 0.9, "the fixture is mostly near ties"
        assert torch.equal(logits.argmax(-1)[clear], torch.tensor(ours)[clear])


def test_live_transformers_model_shares_memory_and_tokens(llm, reference):
    wrapped = LLM.from_transformers(reference, llm.tokenizer, max_rows=4, max_model_len=256)
    theirs = reference.model.layers[2].mlp.experts.gate_up_proj
    assert wrapped.model.layers[2].ffn.experts.w13.data_ptr() == theirs.data_ptr()
    short = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    ours, wraps = (one.generate(PROMPTS, short, progress=False) for one in (llm, wrapped))
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in wraps]
