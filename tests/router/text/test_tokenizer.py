"""Tokens are bytes, whatever their neighbours."""

from __future__ import annotations

import codecs
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from doubles.tokenizers import (
    FIRST_BYTE_ID,
    VOCAB_SIZE,
    byte_level,
    sentencepiece_tokenizer,
    tiny_tokenizer,
    write_checkpoint,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from space_router.config import ServeConfig, build
from space_router.errors import ConfigError
from space_router.text.chat_template import BUILT_IN, ChatTemplate, find
from space_router.text.fim import FillInTheMiddle
from space_router.text.model_text import ModelText
from space_router.text.tokenizer import UNCHANGED_MODEL_TYPES, Tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

TINY, PIECES = tiny_tokenizer(), sentencepiece_tokenizer()
INNER = byte_level()
QUICK = settings(max_examples=60, deadline=None)


@QUICK
@given(st.text())
def test_a_text_comes_back_from_its_ids(text: str) -> None:
    assert TINY.decode(TINY.encode(text), skip_special_tokens=False) == text


@QUICK
@given(st.lists(st.integers(0, VOCAB_SIZE - 1)), st.booleans())
def test_any_ids_decode_as_the_tokenizers_library_decodes_them(ids: list[int], skip: bool) -> None:
    assert TINY.decode(ids, skip_special_tokens=skip) == INNER.decode(ids, skip_special_tokens=skip)


def test_sentencepiece_ids_lose_only_the_space_before_the_first_word() -> None:
    hello, world = PIECES.token_to_id("▁Hello"), PIECES.token_to_id("▁world")
    assert hello is not None
    assert world is not None
    assert PIECES.decode([1, hello, world]) == "Hello world"
    assert PIECES.bytes_of[hello] == b" Hello"


def test_half_a_character_is_named_by_its_bytes() -> None:
    assert TINY.token_text(FIRST_BYTE_ID + 0xE2) == "bytes:\\xe2"
    assert TINY.token_text(FIRST_BYTE_ID + ord("x")) == "x"


def test_an_id_without_a_token_has_no_bytes() -> None:
    assert TINY.bytes_of[VOCAB_SIZE + 5] == b""


def test_bos_is_added_where_only_the_config_says_so() -> None:
    tokenizer = Tokenizer(byte_level(), {"bos_token": "<|endoftext|>", "add_bos_token": True})
    assert tokenizer.encode("x") == [0, FIRST_BYTE_ID + ord("x")]
    assert tokenizer.encode("x", add_special_tokens=False) == [FIRST_BYTE_ID + ord("x")]


def test_an_unknown_decoder_is_refused_by_name() -> None:
    inner = byte_level()
    inner.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer(inner, {})


def test_a_checkpoint_folder_is_read_with_its_hash(tmp_path: Path) -> None:
    loaded = Tokenizer.load(write_checkpoint(tmp_path))
    assert loaded.eos_token == "<|endoftext|>"
    assert len(loaded.content_hash) == 64
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("vocab", "message"),
    [({"zz": 2**31}, "has the id 2147483648; ids are 16777215 at most"), (None, "tokenizer.json cannot be read: Unk")],
    ids=["an id beyond any vocabulary", "no vocabulary"],
)
@pytest.mark.timeout(20)
def test_a_vocabulary_that_no_text_can_be_written_in_is_refused(
    vocab: dict[str, int] | None, message: str, tmp_path: Path
) -> None:
    file = write_checkpoint(tmp_path) / "tokenizer.json"
    content = json.loads(file.read_text())
    model = content["model"]
    more = {"vocab": {}, "merges": [], "unk_token": "<unk>"} if vocab is None else {"vocab": model["vocab"] | vocab}
    file.write_text(json.dumps(content | {"model": model | more}))
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(tmp_path)


MESSAGES = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "  hello world, what is `x` ?\n"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "ünïcode 🙂 [INST] </s> the end"},
]
SPECIAL = ("<unk>", "<s>", "</s>")
TEXTS = ["hello world, what is the answer?", "[INST] the user asks the assistant [/INST]",
         "USER: hello ASSISTANT: the end", "### Instruction: answer in one word ### Response:"]  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> tokenizers.Tokenizer:
    """A BPE of SentencePiece's kind, with its bytes, and a few dozen words."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=[*SPECIAL, *bytes_], show_progress=False)
    made.train_from_iterator(TEXTS * 20, trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][:3]  # bytes are no added tokens
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def old_form(trained: tokenizers.Tokenizer, *, normalized: bool) -> dict[str, Any]:
    """tokenizer.json as Llama 2 has it: a space before every piece of text between special tokens."""
    made = tokenizers.Tokenizer.from_str(trained.to_str())
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = None
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    content: dict[str, Any] = json.loads(made.to_str())
    for token in content["added_tokens"]:
        token["normalized"] = normalized
    return content


def new_form(trained: tokenizers.Tokenizer) -> dict[str, Any]:
    """tokenizer.json as transformers saves it today."""
    content = old_form(trained, normalized=False)
    scheme = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return content | {"normalizer": None, "pre_tokenizer": scheme}


def write(folder: Path, content: dict[str, Any], config: dict[str, Any], model_type: str = "llama") -> Path:
    folder.mkdir()
    for name, value in (
        ("tokenizer.json", content),
        ("tokenizer_config.json", config),
        ("config.json", {"model_type": model_type}),
    ):
        (folder / name).write_text(json.dumps(value))
    return folder


def ours(folder: Path, source: str, messages: list[dict[str, Any]]) -> list[int]:
    tokenizer = Tokenizer.load(folder)
    text = ChatTemplate(source, tokenizer.named_tokens).render(messages)
    return tokenizer.encode(text, add_special_tokens=False)


def theirs(folder: Path, source: str, messages: list[dict[str, Any]]) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    made = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=True, add_generation_prompt=True)
    return list(made["input_ids"])


NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
AS_OBJECTS = {
    name: {"__type": "AddedToken", "content": text, "lstrip": False, "normalized": True, "rstrip": False}
    for name, text in NAMED.items()
}
FLAGS = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
DECODER = {str(id_): {"content": text, "special": True, **FLAGS} for id_, text in enumerate(SPECIAL)}


@pytest.mark.parametrize("legacy", [True, False, None])
@pytest.mark.parametrize(
    "name", ["LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "PreTrainedTokenizerFast"]
)
def test_a_chat_has_the_ids_that_transformers_gives_it(
    tmp_path: Path, trained: tokenizers.Tokenizer, name: str, legacy: bool | None
) -> None:
    forms = {
        "old": old_form(trained, normalized=False),
        "old, normalized": old_form(trained, normalized=True),
        "new": new_form(trained),
    }
    wrong = []
    ways: list[dict[str, Any]] = [NAMED, AS_OBJECTS, {**NAMED, "added_tokens_decoder": DECODER}]
    for number, ((form, content), way, source) in enumerate(itertools.product(forms.items(), ways, BUILT_IN)):
        if source == "chatml":  # it prints no `<s>`
            continue
        config = {"tokenizer_class": name, **way} | ({} if legacy is None else {"legacy": legacy})
        folder = write(tmp_path / str(number), content, config)
        if ours(folder, BUILT_IN[source], MESSAGES) != theirs(folder, BUILT_IN[source], MESSAGES):
            wrong.append((form, sorted(way), source))
    assert wrong == []


@pytest.mark.parametrize(
    "more", [{"add_prefix_space": False}, {"add_prefix_space": True, "legacy": True}, {"add_prefix_space": None}]
)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "phi3", "gemma"])
def test_the_model_s_type_and_the_prefix_switch_decide_as_in_transformers(
    tmp_path: Path, trained: tokenizers.Tokenizer, model_type: str, more: dict[str, Any]
) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", **NAMED, **more}
    folder = write(tmp_path / "m", old_form(trained, normalized=False), config, model_type)
    assert ours(folder, BUILT_IN["llama-2"], MESSAGES) == theirs(folder, BUILT_IN["llama-2"], MESSAGES)


def test_a_token_that_only_the_special_tokens_map_names_is_in_the_prompt(
    tmp_path: Path, trained: tokenizers.Tokenizer
) -> None:
    for number, special_map in enumerate((NAMED, {name: {"content": text} for name, text in NAMED.items()})):
        folder = write(tmp_path / str(number), new_form(trained), {"tokenizer_class": "PreTrainedTokenizerFast"})
        (folder / "special_tokens_map.json").write_text(json.dumps(special_map))
        ids = ours(folder, BUILT_IN["vicuna"], MESSAGES)
        assert ids == theirs(folder, BUILT_IN["vicuna"], MESSAGES)
        assert ids[0] == 1
        assert Tokenizer.load(folder).eos_token == "</s>"


def test_a_special_token_that_tokenizer_json_does_not_list_is_read_whole(
    tmp_path: Path, trained: tokenizers.Tokenizer
) -> None:
    content = new_form(trained)
    content["added_tokens"] = []
    for number, way in enumerate((NAMED, {"added_tokens_decoder": DECODER}, {"extra_special_tokens": list(SPECIAL)})):
        folder = write(tmp_path / str(number), content, {"tokenizer_class": "PreTrainedTokenizerFast", **way})
        source = "<s>{{ messages[0].content }}</s>"
        assert ours(folder, source, MESSAGES) == theirs(folder, source, MESSAGES)
        assert ours(folder, source, MESSAGES)[:1] == [1]
        assert {1, 2} <= Tokenizer.load(folder).special_ids


def test_a_token_that_the_config_calls_null_is_none(tmp_path: Path, trained: tokenizers.Tokenizer) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": None, "eos_token": "</s>"}
    folder = write(tmp_path / "m", new_form(trained), config)
    assert Tokenizer.load(folder).bos_token is None
    assert ours(folder, BUILT_IN["vicuna"], MESSAGES) == theirs(folder, BUILT_IN["vicuna"], MESSAGES)


def test_a_byte_level_tokenizer_of_that_class_is_taken_as_it_is(tmp_path: Path) -> None:
    from doubles.tokenizers import byte_level

    folder = write(tmp_path / "m", json.loads(byte_level().to_str()), {"tokenizer_class": "LlamaTokenizer"})
    assert Tokenizer.load(folder).encode("hello\n") == byte_level().encode("hello\n").ids


def test_the_model_types_that_take_the_file_as_it_is_are_transformers_own() -> None:
    from transformers import __version__
    from transformers.models.auto import tokenization_auto as auto

    if tuple(map(int, __version__.split(".")[:2])) < (5, 23):
        pytest.skip(f"the table is of transformers 5.23; this is {__version__}")
    registered = {name for name, kind in auto.TOKENIZER_MAPPING_NAMES.items() if kind == "TokenizersBackend"}
    assert registered | auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS == UNCHANGED_MODEL_TYPES


FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "special_tokens_map.json")


def folder(path: Path) -> Path:
    write_checkpoint(path)
    (path / "generation_config.json").write_text('{"temperature": 0.5}')
    (path / "special_tokens_map.json").write_text('{"pad_token": "<|endoftext|>"}')
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return path


def load(path: Path) -> ModelText:
    return ModelText.load(ServeConfig(model=str(path)))


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    made = folder(tmp_path)
    (made / "additional_chat_templates").mkdir()
    (made / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ messages[0].content }}")
    for file in (*(made / name for name in FILES), *made.rglob("*.jinja")):
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    text = load(made)
    assert text.chat_template is not None
    assert text.chat_template.render([{"role": "user", "content": "Hi"}]) == "Hi"
    assert text.chat_template.of([1]).render([{"role": "user", "content": "Hi"}]) == "tools Hi"
    assert text.sampling_defaults == {"temperature": 0.5}
    assert text.tokenizer.pad_token == "<|endoftext|>"


@pytest.mark.parametrize("name", [*FILES, "chat_template.jinja"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content + b"\xff", "is not UTF-8: the byte 0xff at"),
        (lambda content: content.decode().encode("utf-16"), "is UTF-16. Save it as UTF-8"),
    ],
)
def test_a_file_in_another_encoding_is_named(tmp_path: Path, name: str, damage: Any, words: str) -> None:
    file = folder(tmp_path) / name
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert words in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_template_file_that_was_asked_for_may_have_a_mark_and_must_be_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_bytes(codecs.BOM_UTF8 + b"{{ messages[0].content }}")
    found = find(tmp_path, str(file), {})
    assert found is not None
    assert found.render([{"role": "user", "content": "Hi"}]) == "Hi"
    file.write_bytes(b"\xfe{{ 1 }}")
    with pytest.raises(ConfigError, match=r"mine\.jinja is not UTF-8: the byte 0xfe at 0"):
        find(tmp_path, str(file), {})


def test_the_first_key_of_a_key_file_with_a_mark_is_the_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(codecs.BOM_UTF8 + b"alpha name=team-a\n")
    (key,) = build({"api_key_file": str(file)}, {}).api_keys
    assert key.name == "team-a"
    file.write_text("alpha name=team-a\n")
    assert build({"api_key_file": str(file)}, {}).api_keys == (key,)


TEXT, LIST = "from the config", [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"chat_template": TEXT}, {}, (TEXT, None)),
        ({"chat_template": LIST}, {}, ("d", "t")),
        ({"chat_template": {"default": "d", "tool_use": "t"}}, {}, ("d", "t")),
        ({"chat_template": LIST}, {"chat_template.jinja": "file"}, ("file", None)),
        ({"chat_template": TEXT}, {"chat_template.jinja": "file"}, ("file", None)),
        (
            {"chat_template": TEXT},
            {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "tools"},
            ("file", "tools"),
        ),
        ({}, {"chat_template.json": json.dumps({"chat_template": "processor's"})}, ("processor's", None)),
        ({"chat_template": TEXT}, {"chat_template.json": json.dumps({"chat_template": "processor's"})}, (TEXT, None)),
        ({}, {}, None),
    ],
)
def test_templates_are_taken_from_where_transformers_takes_them(
    tmp_path: Path, config: dict[str, Any], files: dict[str, str], expected: tuple[str, str | None] | None
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "additional_chat_templates").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    found = find(tmp_path, None, {})
    tools = None if found is None or found.with_tools is None else found.with_tools.source
    assert (None if found is None else (found.source, tools)) == expected


PREFIX_FIRST = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
]


def tokenizer_with(*tokens: str) -> Tokenizer:
    """The tiny one, with some more special tokens at its end."""
    inner = byte_level()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return Tokenizer(inner, {"bos_token": "<|endoftext|>"})


@pytest.mark.parametrize("names", PREFIX_FIRST)
def test_most_families_read_the_prefix_first(names: tuple[str, str, str]) -> None:
    tokenizer = tokenizer_with(*names)
    fim = FillInTheMiddle.of(tokenizer)
    assert fim is not None
    prefix, suffix, middle = (tokenizer.token_to_id(name) for name in names)
    assert fim.ids([1, 2], [7]) == [prefix, 1, 2, suffix, 7, middle]
    assert fim.num_tokens == 3


def test_some_read_the_suffix_first_and_codestral_has_no_token_for_the_middle() -> None:
    codestral = FillInTheMiddle.of(tokenizer_with("[PREFIX]", "[SUFFIX]"))
    assert codestral is not None
    assert codestral.ids([1, 2], [7]) == [codestral.suffix_id, 7, codestral.prefix_id, 1, 2]
    assert codestral.num_tokens == 2
    seed_coder = FillInTheMiddle.of(tokenizer_with("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"))
    assert seed_coder is not None
    expected = [seed_coder.suffix_id, 7, seed_coder.prefix_id, 1, 2, seed_coder.middle_id]
    assert seed_coder.ids([1, 2], [7]) == expected


def test_a_tokenizer_without_all_of_a_familys_tokens_cannot() -> None:
    assert FillInTheMiddle.of(tiny_tokenizer()) is None
    assert FillInTheMiddle.of(tokenizer_with("<fim_prefix>", "<fim_suffix>")) is None
    assert FillInTheMiddle.of(tokenizer_with("[PREFIX]")) is None


def test_what_a_family_writes_behind_the_middle_ends_it() -> None:
    tokenizer = tokenizer_with("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    fim = FillInTheMiddle.of(tokenizer)
    assert fim is not None
    assert fim.end_ids == (tokenizer.token_to_id("▁<EOT>"),)


def test_a_text_inside_another_gets_no_space_before_its_first_word() -> None:
    tokenizer = with_a_space_in_front()

    def tokens(ids: list[int]) -> list[str]:
        return [tokenizer.token_text(id_) for id_ in ids]

    assert tokens(tokenizer.encode("Hi")) == [" Hi"]
    assert tokens(tokenizer.encode_inside("Hi")) == ["H", "i"]
    assert tokens(tokenizer.encode_inside(" Hi")) == [" Hi"]
    assert tokens(tokenizer.encode_inside("\n s")) == ["\n", " ", "s"]
    bytewise = tiny_tokenizer()
    assert bytewise.encode_inside("hello w") == bytewise.encode("hello w")


def with_a_space_in_front() -> Tokenizer:
    """As Llama 2 writes texts: a space before the first word, and ▁ for every space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "H", "i", "s", "▁H", "▁Hi"]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    merges = [("▁", "H"), ("▁H", "i")]
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(parts)
    return Tokenizer(inner, {"bos_token": "<s>", "eos_token": "</s>"})
