"""Ids of hard lines, as llama.cpp (llama-cpp-python 0.3.36) gives them.

llama_lines.json is made by compare_with_llama.py, which compares 10,000 lines and every id of the real vocabularies.
"""

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
from space_common.gguf.reader import GgufFile
from space_common.gguf.tokenizer import PRE_TOKENIZERS, tokenizer_files

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
