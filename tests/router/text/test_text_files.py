"""A checkpoint's text files are read however they were saved, and from where transformers reads them."""

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
from doubles.tokenizers import write_checkpoint
from space_router.config import ServeConfig, build
from space_router.errors import ConfigError
from space_router.text.chat_template import find
from space_router.text.model_text import ModelText

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
