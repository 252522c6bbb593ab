"""A prompt has the ids that transformers gives it, whatever the files of a Llama tokenizer leave to its class."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from space_router.text.chat_template import BUILT_IN, ChatTemplate
from space_router.text.tokenizer import UNCHANGED_MODEL_TYPES, Tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

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
