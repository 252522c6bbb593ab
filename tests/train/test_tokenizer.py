"""The tokenizer loads in transformers and has the ids and pieces that serving needs."""

from pathlib import Path

import pytest
from space_train.tokenizer import FIRST_MASK_ID, SPECIAL_TOKENS, train_tokenizer, write_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

CODE = "def add(a, b):\n        return a + b\n\n\nclass Sum:\n    def of(self, values):\n        return sum(values)\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(train_tokenizer([CODE] * 3, 320), folder, window=64)
    return AutoTokenizer.from_pretrained(folder)


def test_text_comes_back_byte_for_byte_and_special_tokens_have_their_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    text = CODE + "\tnaïve = 'ß'  \r\n\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == list(range(12))
    assert tokenizer.convert_ids_to_tokens(FIRST_MASK_ID) == "<|mask_1|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 3)
    assert tokenizer.model_max_length == 64


def test_an_indentation_is_one_token_and_is_never_joined_to_the_line_end_before_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    pieces = [tokenizer.decode([index]) for index in tokenizer("def add(a, b):\n        return a")["input_ids"]]
    assert "        " in pieces
    assert not any(piece.startswith("\n") and piece.endswith(" ") for piece in pieces)


def test_a_chat_becomes_code_to_continue(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add two\nnumbers."},
        {"role": "assistant", "content": "x = 1"},
        {"role": "user", "content": "def f():"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "# Be brief.\n# Add two\n# numbers.\nx = 1\ndef f():\n"
