"""The tokenizer of a checkpoint: special tokens, chat templates and the errors that name what is missing."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from polytempo.errors import CheckpointError, RequestError
from polytempo.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "  {% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}\n"
    "<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hi <b>"}]


def backend(bos_by_processor=False):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<bos>", "<eos>", "<|user|>", "<|assistant|>"])
    if bos_by_processor:
        made.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 256)])
    return made


@pytest.fixture
def folder(tmp_path):
    backend().save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path)
    return tmp_path


def write_config(folder, **changes):
    config = {
        "bos_token": {"content": "<bos>", "special": True},
        "eos_token": "<eos>",
        "add_bos_token": True,
        "chat_template": TEMPLATE,
        **changes,
    }
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))


def test_text_goes_there_and_back(folder):
    tokenizer = Tokenizer.from_dir(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (256, 257, 260)
    ids = tokenizer.encode("a🙂", add_special_tokens=False)
    assert len(ids) == 5 and tokenizer.encode("a🙂") == [256, *ids]
    assert tokenizer.decode([256, *ids, 257]) == "a🙂"
    assert tokenizer.decode([256, *ids, 257], skip_special_tokens=False) == "<bos>a🙂<eos>"
    assert tokenizer.token_of(256) == "<bos>" and tokenizer.token_of(999) is None
    with pytest.raises(RequestError, match="must be a string, not list"):
        tokenizer.encode([1])


def test_add_bos_token_overrides_the_files_own_rule(tmp_path):
    backend(bos_by_processor=True).save(str(tmp_path / "tokenizer.json"))
    for add_bos_token, expected in ((None, 1), (True, 1), (False, 0)):
        write_config(tmp_path, add_bos_token=add_bos_token)
        assert Tokenizer.from_dir(tmp_path).encode("a").count(256) == expected


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    made = backend()
    made.enable_truncation(2)
    made.enable_padding(length=9)
    made.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, add_bos_token=None)
    assert len(Tokenizer.from_dir(tmp_path).encode("abcde")) == 5


def test_a_chat_is_rendered_and_encoded_with_one_bos(folder):
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer.render_chat(MESSAGES) == "<bos><|user|>hi <b><|assistant|>"
    assert tokenizer.render_chat(MESSAGES, add_generation_prompt=False) == "<bos><|user|>hi <b>"
    ids = tokenizer.apply_chat_template(MESSAGES)
    assert ids.count(256) == 1 and ids[1] == 258 and ids[-1] == 259


def test_the_template_file_takes_precedence_and_lists_have_a_default(folder):
    write_config(folder, chat_template=[{"name": "default", "template": "D{{ messages|length }}"}])
    assert Tokenizer.from_dir(folder).render_chat(MESSAGES) == "D1"
    write_config(folder, chat_template=[{"name": "tools", "template": "T"}])
    with pytest.raises(CheckpointError, match="tools.*no 'default'"):
        Tokenizer.from_dir(folder)
    write_config(folder)
    (folder / "chat_template.jinja").write_text("F{{ {'k': 'ü<'}|tojson }}{{ tools }}")
    assert Tokenizer.from_dir(folder).render_chat(MESSAGES, tools=3) == 'F{"k": "ü<"}3'


def test_a_template_can_neither_reach_python_nor_change_the_messages(folder):
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        (folder / "chat_template.jinja").write_text(source)
        with pytest.raises(RequestError, match="refuses these messages"):
            Tokenizer.from_dir(folder).render_chat(list(MESSAGES))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("hi", "non-empty list"),
        ({"role": "user", "content": "x"}, "non-empty list"),
        (None, "non-empty list"),
        (["hi"], r"messages\[0\] must be a dict, not str"),
        ([*MESSAGES, {"content": "x"}], r"messages\[1\].role=None"),
        ([{"role": 3, "content": "x"}], r"messages\[0\].role=3"),
        ([{"role": "user"}], r"messages\[0\].content must be a string, not NoneType"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be a string, not int"),
        ([{"role": "bad", "content": ""}], "no such role"),
    ],
)
def test_bad_messages_are_refused(folder, messages, message):
    with pytest.raises(RequestError, match=message):
        Tokenizer.from_dir(folder).apply_chat_template(messages)


def test_content_may_be_missing_beside_tool_calls(folder):
    message = {"role": "assistant", "content": None, "tool_calls": [{}]}
    assert "None" in Tokenizer.from_dir(folder).render_chat([message])


def test_a_missing_template_is_the_requests_error(folder):
    write_config(folder, chat_template=None)
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.from_dir(folder).apply_chat_template(MESSAGES)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_missing_and_broken_files_are_named(folder, name):
    (folder / name).write_text("{")
    with pytest.raises(CheckpointError, match=f"{name} is not"):
        Tokenizer.from_dir(folder)
    (folder / name).write_text("[]")
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.from_dir(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        Tokenizer.from_dir(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token": "<none>"}, "eos_token '<none>' is not in the vocabulary"),
        ({"bos_token": None}, "add_bos_token but names no bos_token"),
        ({"bos_token": 5}, "bos_token=5"),
        ({"chat_template": "{% for %}"}, "does not parse, line 1"),
    ],
)
def test_a_config_that_contradicts_the_vocabulary_is_refused(folder, changes, message):
    write_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_dir(folder)


def test_a_transformers_tokenizer_gives_the_same_ids():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend(bos_by_processor=True), bos_token="<bos>", eos_token="<eos>"
    )
    theirs.chat_template = TEMPLATE
    ours = Tokenizer.from_transformers(theirs)
    assert ours.encode("a🙂 b") == theirs("a🙂 b")["input_ids"]
    rendered = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert ours.render_chat(MESSAGES) == rendered
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    with pytest.raises(CheckpointError, match="object has no `tokenizers` backend"):
        Tokenizer.from_transformers(object())
