"""Messages become the prompt their model was trained on; templates can do no harm."""

from pathlib import Path

import pytest
from space_router.errors import ConfigError, InvalidRequest
from space_router.text.chat_template import BUILT_IN, ChatTemplate, find

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "Why?"},
]
EXPECTED = {
    "vicuna": "<s>Be brief. USER: Hi ASSISTANT: Yo</s>USER: Why? ASSISTANT:",
    "llama-2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Yo </s><s>[INST] Why? [/INST]",
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    "alpaca": "<s>Be brief.\n\n### Instruction:\nHi\n\n### Response:\nYo</s>\n\n### Instruction:\nWhy?"
    "\n\n### Response:\n",
}


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_built_in_template_writes_a_conversation(name: str) -> None:
    assert ChatTemplate(BUILT_IN[name], TOKENS).render(TALK) == EXPECTED[name]


def test_vicuna_without_a_system_message_has_its_own() -> None:
    text = ChatTemplate(BUILT_IN["vicuna"], {}).render([{"role": "user", "content": "Hi"}])
    assert text.startswith("A chat between a curious user")
    assert text.endswith(" USER: Hi ASSISTANT:")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('user first') }}", "user first"),
        ("{{ messages[7].content }}", "messages"),
        ("{{ ''.__class__.__mro__ }}{{ x.y }}", "template"),
        ("{% do messages.append(1) %}", "template"),
        ("{{ messages.append(1) }}", "template"),
        ("{% for i in range(99999999) %}x{% endfor %}", "template"),
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_the_requests_error(source: str, words: str) -> None:
    try:
        template = ChatTemplate(source, {})
    except ConfigError:
        return
    with pytest.raises(InvalidRequest, match=words):
        template.render([{"role": "user", "content": "Hi"}])


def test_tojson_writes_plain_json() -> None:
    text = ChatTemplate("{{ messages[0] | tojson }}", {}).render([{"role": "user", "content": "<é>"}])
    assert text == '{"role": "user", "content": "<é>"}'


def test_the_checkpoints_own_template_is_found_unless_another_is_asked_for(tmp_path: Path) -> None:
    assert find(tmp_path, None, {}) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "config"}')
    own = find(tmp_path, None, {})
    assert own is not None
    assert own.render(TALK) == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    own = find(tmp_path, None, {})
    assert own is not None
    assert own.render(TALK) == "file"
    asked = find(tmp_path, "chatml", {})
    assert asked is not None
    assert asked.render(TALK) == EXPECTED["chatml"]
    with pytest.raises(ConfigError, match="neither one of vicuna"):
        find(tmp_path, "nonsense", {})


def test_a_template_that_is_no_jinja_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="no valid Jinja"):
        ChatTemplate("{% if %}", {})
