"""The chat template of a real file, as the router and as transformers render it."""

import os
from pathlib import Path
from typing import Any

import pytest
from space_common.gguf.reader import GgufFile
from space_common.gguf.tokenizer import tokenizer_files
from space_router.text import chat_template
from space_router.text.tokenizer import Tokenizer
from transformers import AutoTokenizer

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
    """The tokenizer files of SmolLM2."""
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
