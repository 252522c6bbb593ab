"""What ends every text: the generation config's list, or the config's without one, and the tokenizer's EOS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from space_model.checkpoint.checkpoint import Checkpoint, tokenizer_eos
from space_model.testing import tiny_checkpoint

ADDED = {"added_tokens": [{"id": 7, "content": "<|im_end|>"}], "model": {"vocab": {"a": 0, "</s>": 2}}}
UNIGRAM = {"model": {"vocab": [["<unk>", 0.0], ["a", -1.0], ["</s>", 0.0]]}}

NAMED: dict[str, tuple[dict[str, Any], int | None]] = {
    "by an added token": ({"tokenizer.json": ADDED, "tokenizer_config.json": {"eos_token": "<|im_end|>"}}, 7),
    "as an object": ({"tokenizer.json": ADDED, "tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}}}, 7),
    "by a word of the vocabulary": ({"tokenizer.json": ADDED, "tokenizer_config.json": {"eos_token": "</s>"}}, 2),
    "by a piece of a unigram model": ({"tokenizer.json": UNIGRAM, "tokenizer_config.json": {"eos_token": "</s>"}}, 2),
    "in added_tokens_decoder": (
        {"tokenizer_config.json": {"eos_token": "</s>", "added_tokens_decoder": {"5": {"content": "</s>"}}}},
        5,
    ),
    "in special_tokens_map.json alone": (
        {"tokenizer.json": ADDED, "special_tokens_map.json": {"eos_token": "</s>"}},
        2,
    ),
    "as null": (
        {
            "tokenizer.json": ADDED,
            "tokenizer_config.json": {"eos_token": None, "added_tokens_decoder": {}},
            "special_tokens_map.json": {"eos_token": "</s>"},
        },
        None,
    ),
    "by a token that is not there": ({"tokenizer.json": ADDED, "tokenizer_config.json": {"eos_token": "<eos>"}}, None),
    "nowhere": ({}, None),
}


@pytest.mark.parametrize("how", NAMED)
def test_a_tokenizer_names_its_eos(how: str) -> None:
    files, expected = NAMED[how]
    assert tokenizer_eos(lambda name: files.get(name, {})) == expected


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 10]}, 9, (3, 10, 7)),
        ({"eos_token_id": 7}, 9, (7,)),
        ({}, 9, (9, 7)),
        (None, [9, 11], (9, 11, 7)),
        (None, None, (7,)),
        ({"eos_token_id": [128, 11, -1]}, 9, (11, 7)),
    ],
)
def test_the_eos_ids_are_the_generation_config_s_and_the_tokenizer_s(
    tmp_path: Path, generation: dict[str, Any] | None, config: Any, expected: tuple[int, ...]
) -> None:
    folder = tiny_checkpoint(tmp_path / "m", eos_token_id=config)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer.json").write_text(json.dumps(ADDED))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert Checkpoint.open(folder).eos_ids(vocab_size=128) == expected
