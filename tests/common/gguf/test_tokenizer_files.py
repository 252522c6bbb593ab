"""Tokenizer files made from the metadata of small vocabularies."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from space_common.gguf.find import GgufError
from space_common.gguf.reader import GgufFile
from space_common.gguf.tokenizer import PRE_TOKENIZERS, tokenizer_files
from space_router.text import chat_template
from space_router.text.tokenizer import Tokenizer
from space_server.grammar import TokenVocabulary
from transformers import AutoTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"


def letters() -> list[str]:
    """The 256 letters of byte-level BPE, one for each byte."""
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def byte_level(pre: str | None = "smollm", **more: Any) -> dict[str, Any]:
    """A vocabulary of bytes, a few merges and special tokens of every kind."""
    merges = ["Ġ t", "h e", "Ġt he", "1 2", "12 3"]
    special = ["<|im_start|>", "<|im_end|>", "<table>", "[PAD300]"]
    tokens = letters() + [merge.replace(" ", "") for merge in merges] + special
    types = [NORMAL] * (len(tokens) - 4) + [CONTROL, CONTROL, USER_DEFINED, UNUSED]
    keys = {
        "model": "gpt2", "tokens": tokens, "token_type": types, "merges": merges,
        "bos_token_id": tokens.index("<|im_start|>"), "eos_token_id": tokens.index("<|im_end|>"),
    }  # fmt: skip
    if pre is not None:
        keys["pre"] = pre
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | more).items()}


def sentencepiece(**more: Any) -> dict[str, Any]:
    """Pieces with scores: "ab" and "aba" come from merges, every other character from bytes."""
    control = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["ab", "aba", "▁a", "abab", "a", "b", "▁"]
    tokens = control + bytes_ + pieces
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces)
    scores = [0.0] * (3 + 256) + [-float(rank) for rank in range(len(pieces))]
    keys = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | more).items()}


def load(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    for name, text in tokenizer_files(metadata).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return Tokenizer.load(folder)


def pieces(tokenizer: Tokenizer, text: str, *, bos: bool = False) -> list[str]:
    return [str(tokenizer._inner.id_to_token(id_)) for id_ in tokenizer.encode(text, add_special_tokens=bos)]


def test_the_named_pre_tokenizer_decides_which_merges_can_happen(tmp_path: Path) -> None:
    text = "the 1234"
    cut = {pre: pieces(load(byte_level(pre), tmp_path), text) for pre in ("smollm", "gpt-2", "llama-bpe")}
    assert cut["smollm"] == ["t", "he", "Ġ", "1", "2", "3", "4"]
    assert cut["gpt-2"] == ["t", "he", "Ġ", "123", "4"]
    assert cut["llama-bpe"] == ["t", "he", "Ġ", "123", "4"]
    assert pieces(load(byte_level("qwen2"), tmp_path), text) == cut["smollm"]


def test_a_missing_pre_tokenizer_is_the_default_one() -> None:
    assert tokenizer_files(byte_level(None)) == tokenizer_files(byte_level("default"))


def test_an_unknown_pre_tokenizer_is_refused_by_name_with_the_cure() -> None:
    with pytest.raises(GgufError, match=r"'brand-new'.*Serve the original checkpoint"):
        tokenizer_files(byte_level("brand-new"))


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", "gemma4", None])
def test_another_kind_of_tokenizer_is_refused_by_name_with_the_cure(model: str | None) -> None:
    with pytest.raises(GgufError, match=rf"{model!r}.*Serve the original checkpoint"):
        tokenizer_files(byte_level(model=model))


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_every_byte_of_a_text(pre: str, tmp_path: Path) -> None:
    tokenizer = load(byte_level(pre), tmp_path)
    text = "Ünïcode's 1234567 the  \n\n\t we'Ve (x|y).🙂 漢字 नमस्ते\r\n \u00a0e\u0301"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_control_tokens_are_special_and_user_defined_ones_are_text(tmp_path: Path) -> None:
    tokenizer = load(byte_level(), tmp_path)
    text = "<table>the<|im_end|>"
    assert pieces(tokenizer, text) == ["<table>", "t", "he", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode(text)) == "<table>the"


def test_a_padding_row_of_the_head_is_no_text_and_no_token_of_a_text(tmp_path: Path) -> None:
    metadata = byte_level()
    tokenizer = load(metadata, tmp_path)
    tokens = metadata["tokenizer.ggml.tokens"]
    padding = tokens.index("[PAD300]")
    assert tokenizer.bytes_of[padding] == b""
    assert TokenVocabulary.read(tmp_path, len(tokens)).texts[padding] == b""
    assert padding not in tokenizer.encode("[PAD300]")


def test_router_and_worker_read_the_same_bytes_of_each_id(tmp_path: Path) -> None:
    for metadata in (byte_level(), sentencepiece()):
        tokenizer = load(metadata, tmp_path)
        texts = TokenVocabulary.read(tmp_path, len(metadata["tokenizer.ggml.tokens"])).texts
        assert all(
            texts[id_] == (b"" if id_ in tokenizer.special_ids else tokenizer.bytes_of[id_])
            for id_ in range(len(texts))
        )


def test_the_highest_score_merges_first_and_the_left_one_of_equals(tmp_path: Path) -> None:
    tokenizer = load(sentencepiece(add_space_prefix=False), tmp_path)
    assert pieces(tokenizer, "aba") == ["aba"]
    assert pieces(tokenizer, "abbaba") == ["ab", "b", "aba"]
    assert pieces(tokenizer, "ababa") == ["ab", "aba"]  # "ab" twice, then "aba" before "abab"
    assert pieces(tokenizer, "abab") == ["abab"]
    assert pieces(tokenizer, "a\n▁") == ["a", "<0x0A>", "▁"]


def test_a_space_stands_before_the_first_word_where_the_file_says_so_or_nothing(tmp_path: Path) -> None:
    assert pieces(load(sentencepiece(), tmp_path), "ab") == ["▁", "ab"]
    assert pieces(load(sentencepiece(add_space_prefix=True), tmp_path), "ab") == ["▁", "ab"]
    prefixed = load(sentencepiece(), tmp_path)
    assert prefixed.decode(prefixed.encode("ab ab")) == "ab ab"
    assert pieces(load(sentencepiece(add_space_prefix=False), tmp_path), "ab") == ["ab"]


def test_bos_and_eos_are_added_as_the_file_says_else_as_the_kind_does(tmp_path: Path) -> None:
    assert pieces(load(sentencepiece(), tmp_path), "b", bos=True) == ["<s>", "▁", "b"]
    assert pieces(load(sentencepiece(add_bos_token=False), tmp_path), "b", bos=True) == ["▁", "b"]
    assert pieces(load(byte_level(), tmp_path), "b", bos=True) == ["b"]
    assert pieces(load(byte_level("llama-bpe"), tmp_path), "b", bos=True) == ["<|im_start|>", "b"]
    both = byte_level(add_bos_token=True, add_eos_token=True)
    assert pieces(load(both, tmp_path), "b", bos=True) == ["<|im_start|>", "b", "<|im_end|>"]


def test_the_special_tokens_have_their_roles_in_the_config(tmp_path: Path) -> None:
    tokenizer = load(sentencepiece(padding_token_id=0), tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert (tokenizer.unk_token, tokenizer.pad_token) == ("<unk>", "<unk>")


def ends(metadata: dict[str, Any]) -> list[str]:
    found = json.loads(tokenizer_files(metadata)["generation_config.json"])["eos_token_id"]
    return [metadata["tokenizer.ggml.tokens"][id_] for id_ in found]


def test_every_token_that_ends_a_generation_is_listed_the_named_one_first() -> None:
    tokens = ["a", "<|eot_id|>", "</s>", "<|eom_id|>", "<|endoftext|>", "b", "<turn_over>", "<|end_of_text|>"]
    types = [NORMAL, CONTROL, CONTROL, CONTROL, USER_DEFINED, NORMAL, CONTROL, CONTROL]
    metadata = byte_level(tokens=tokens, token_type=types, merges=[], eos_token_id=7, eot_token_id=6, bos_token_id=1)
    assert ends(metadata) == [
        "<|end_of_text|>", "<|eot_id|>", "</s>", "<|eom_id|>", "<|endoftext|>", "<turn_over>",
    ]  # fmt: skip


def test_a_token_of_a_repository_or_file_ends_what_was_to_be_filled_in() -> None:
    tokens = ["<eos>", "<|repo_name|>", "<reponame>", "<|file_sep|>", "<|fim_pad|>", "<|fim_prefix|>"]
    metadata = byte_level(tokens=tokens, token_type=[CONTROL] * 6, merges=[], eos_token_id=0, fim_pad_token_id=4)
    assert ends(metadata) == ["<eos>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"]


def test_an_ordinary_word_that_looks_like_a_special_token_is_none() -> None:
    tokens = [*letters(), "[P", "AD", "AD]", "[PAD]", "<|im_end|>"]
    metadata = byte_level(
        tokens=tokens, token_type=[NORMAL] * len(tokens), merges=["[ P", "A D", "AD ]", "[P AD]"], eos_token_id=0
    )
    assert ends(metadata) == [tokens[0], "<|im_end|>"]
    added = json.loads(tokenizer_files(metadata)["tokenizer.json"])["added_tokens"]
    assert [token["content"] for token in added] == ["<|im_end|>"]


def test_a_closing_tag_that_is_text_ends_nothing() -> None:
    tokens = ["<s>", "</s>", "<eos>"]
    metadata = byte_level(tokens=tokens, token_type=[USER_DEFINED, USER_DEFINED, CONTROL], merges=[], eos_token_id=2)
    assert ends(metadata) == ["<eos>"]


def test_the_end_of_a_part_ends_nothing_where_other_tokens_end_the_answer() -> None:
    tokens = ["<|end|>", "<|return|>", "<|call|>", "<|channel|>"]
    metadata = byte_level(tokens=tokens, token_type=[CONTROL] * 4, merges=[], eos_token_id=1)
    assert ends(metadata) == ["<|return|>", "<|call|>"]
    added = json.loads(tokenizer_files(metadata)["tokenizer.json"])["added_tokens"]
    assert [token["special"] for token in added] == [False, True, True, False]


def test_the_default_and_the_named_chat_templates_are_found(tmp_path: Path) -> None:
    named = {"tokenizer.chat_template": TEMPLATE, "tokenizer.chat_template.tool_use": "{{ tools }}"}
    load(byte_level() | named, tmp_path)
    template = chat_template.find(tmp_path, None, {})
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>"
    assert template.with_tools is not None
    with pytest.raises(GgufError, match="no name for a chat template"):
        tokenizer_files(byte_level() | {"tokenizer.chat_template.../../x": "…"})


def test_a_file_without_templates_gives_none() -> None:
    assert not any(name.endswith(".jinja") for name in tokenizer_files(byte_level()))


def test_phi_3s_special_tokens_swallow_the_white_space_behind_them(tmp_path: Path) -> None:
    tokens = sentencepiece()["tokenizer.ggml.tokens"] + ["<|user|>"]
    types = sentencepiece()["tokenizer.ggml.token_type"] + [CONTROL]
    scores = sentencepiece()["tokenizer.ggml.scores"] + [-1000.0]
    named = sentencepiece(tokens=tokens, token_type=types, scores=scores, add_space_prefix=False)
    assert pieces(load(named, tmp_path), "<|user|>\n a") == ["<|user|>", "<0x0A>", "▁a"]
    named["general.name"] = "Phi-3 mini"
    assert pieces(load(named, tmp_path), "<|user|>\n a") == ["<|user|>", "a"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"merges": ["q u"]}, "'q u', whose parts or whole are no tokens"),
        ({"tokens": ["a", "b", "a"]}, "'a' more than once"),
        ({"token_type": [1]}, "token_type has 1 entries for"),
    ],
)
def test_a_broken_vocabulary_is_refused_with_the_cure(change: dict[str, Any], words: str) -> None:
    with pytest.raises(GgufError, match=words):
        tokenizer_files(byte_level(**change))


def test_a_vocabulary_without_scores_or_merges_is_refused_with_the_cure() -> None:
    with pytest.raises(GgufError, match=r"scores has 0 entries for 266 tokens.*Convert"):
        tokenizer_files(sentencepiece(scores=None))
    without = byte_level()
    del without["tokenizer.ggml.merges"]
    with pytest.raises(GgufError, match=r"no tokenizer\.ggml\.merges.*Serve"):
        tokenizer_files(without)


def test_the_same_metadata_give_the_same_texts() -> None:
    assert tokenizer_files(sentencepiece()) == tokenizer_files(sentencepiece())
    assert list(tokenizer_files(byte_level())) == ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  2 + 2?\n"}],
    [
        {"role": "user", "content": "Un café, s'il vous plaît ☕"},
        {"role": "assistant", "content": "Voilà."},
        {"role": "user", "content": "{{ 1 }} <|im_end|> <b>"},
    ],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = os.environ.get("SPACESERVE_REAL_MODELS")
    file = Path(models or ".", "SmolLM2-135M-Instruct.Q4_1.gguf")
    if models is None or not file.is_file():
        pytest.skip(f"$SPACESERVE_REAL_MODELS has no {file.name}")
    written = tmp_path_factory.mktemp("smollm2")
    for name, text in tokenizer_files(GgufFile.open(file).metadata).items():
        (written / name).write_text(text, encoding="utf-8")
    return written


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("asks", [True, False])
def test_the_template_of_a_real_file_renders_as_transformers_renders_it(
    messages: list[dict[str, Any]], asks: bool, folder: Path
) -> None:
    tokenizer = Tokenizer.load(folder)
    tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    template = chat_template.find(folder, None, tokens)
    assert template is not None
    text = template.render(messages, add_generation_prompt=asks)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
    assert tokenizer.encode(text) == theirs(text)["input_ids"]
    assert tokenizer.bos_id == theirs.bos_token_id
    assert theirs.eos_token == tokenizer.eos_token


HERE = Path(__file__).parent
MODELS = ("SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf")
NAMES = [
    name for name, pre in PRE_TOKENIZERS.items() if name == next(n for n in PRE_TOKENIZERS if PRE_TOKENIZERS[n] == pre)
]
"""The first of the names of each pre-tokenizer."""


@cache
def recorded() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((HERE / "llama_lines.json").read_text(encoding="utf-8"))
    return content


def lines_of(name: str) -> dict[str, list[int]]:
    """llama.cpp's ids of the lines that a vocabulary is recorded for."""
    return {
        entry["line"]: ids
        for entry in recorded()["lines"]
        for names, ids in entry["ids"].items()
        if name in names.split()
    }


def tokenizer_of(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"])


def ids_of(tokenizer: tokenizers.Tokenizer, lines: dict[str, list[int]]) -> dict[str, list[int]]:
    return {line: tokenizer.encode(line, add_special_tokens=False).ids for line in lines}


def real_model(name: str) -> Path:
    """A real model's file; skips the test where there is none."""
    folder = os.environ.get("SPACESERVE_REAL_MODELS")
    file = Path(folder or ".", name)
    if folder is None or not file.is_file():
        pytest.skip(f"$SPACESERVE_REAL_MODELS has no {name}")
    return file


@pytest.mark.parametrize("pre", NAMES)
def test_words_are_cut_as_llama_cpp_cuts_them(pre: str) -> None:
    lines = lines_of(pre)
    assert len(lines) > 120
    assert ids_of(tokenizer_of(recorded()["byte_level"] | {"tokenizer.ggml.pre": pre}), lines) == lines


@pytest.mark.parametrize("prefixed", [True, False])
def test_scores_merge_as_llama_cpp_merges_them(prefixed: bool) -> None:
    lines = lines_of(f"sentencepiece-{prefixed}")
    assert len(lines) > 220
    metadata = recorded()["sentencepiece"] | {"tokenizer.ggml.add_space_prefix": prefixed}
    assert ids_of(tokenizer_of(metadata), lines) == lines


@pytest.mark.parametrize("name", MODELS)
def test_ids_of_a_real_vocabulary_are_llama_cpps(name: str) -> None:
    metadata = GgufFile.open(real_model(name)).metadata
    lines = lines_of(name)
    assert len(lines) > 220
    assert ids_of(tokenizer_of(metadata), lines) == lines


# Where llama.cpp has to simplify a published pattern, the original tokenizer decides.
@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("tekken", "नमस्ते दुनिया", ["नमस्ते", " दुनिया"]),  # llama.cpp cuts at every combining mark
        ("gpt-4o", "สวัสดี", ["สวัสดี"]),
        ("gpt-4o", "e\u0301cole we've", ["e\u0301cole", " we've"]),
        ("tekken", "caféÉcole", ["café", "École"]),  # llama.cpp knows upper and lower case of ASCII only
        ("llama-bpe", "it'ſ", ["it", "'ſ"]),  # an s in any case, also the long one
        ("deepseek-coder", "\x1f\u2009\x1f", ["\x1f", "\u2009", "\x1f"]),  # U+2009 is within U+0800–U+4E00
        ("superbpe", "१२३४५", ["१२", "३४५"]),  # digits of any script
    ],
)
def test_where_llama_cpp_simplifies_a_pattern_the_published_one_decides(pre: str, text: str, words: list[str]) -> None:
    tokenizer = tokenizer_of(recorded()["byte_level"] | {"tokenizer.ggml.pre": pre})
    cuts = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert cuts == words


@pytest.mark.slow
def test_ten_thousand_lines_and_every_id_of_the_real_vocabularies_are_llama_cpps() -> None:
    python = os.environ.get("SPACESERVE_LLAMA_PYTHON", sys.executable)
    if python == sys.executable and importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama_cpp is not installed; $SPACESERVE_LLAMA_PYTHON may name an interpreter that has it")
    for name in MODELS:
        real_model(name)
    command = [sys.executable, str(HERE / "compare_with_llama.py"), "--python", python]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
