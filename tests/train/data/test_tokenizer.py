"""The tokenizer loads in transformers and has the ids and pieces that serving needs."""

import importlib.resources
import json
from pathlib import Path

import pytest
from space_train.data.corpus import CHAT_TEMPLATE, FIRST_MASK_ID, SPECIAL_TOKENS, train_tokenizer, write_tokenizer
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
    asked = 'def add_two_numbers():\n    """Add two\n    numbers."""\n'
    assert text == f"<|endoftext|># Be brief.\n{asked}x = 1<|endoftext|>def f():\n"


def test_a_chat_with_tools_says_in_comments_what_can_be_called(tokenizer: PreTrainedTokenizerBase) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "A tool.", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "f", "tool_call_id": "1", "content": "2\n3"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|endoftext|># These functions")
    assert '# {"name": "f", "description": "A tool.", "parameters": {"type": "object"}}\n' in text
    written = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|endoftext|>'
    assert text.endswith('def go_on():\n    """Go on."""\n' + written + "# f returned 2\n# 3\n")


def test_the_embedded_model_has_this_template() -> None:
    installed = importlib.resources.files("space_demo") / "chat_template.jinja"
    assert installed.read_text(encoding="utf-8") == CHAT_TEMPLATE
    config = json.loads((importlib.resources.files("space_demo") / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert "chat_template" not in config  # one of two would win
