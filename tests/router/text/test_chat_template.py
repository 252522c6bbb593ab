"""Messages become the prompt their model was trained on; templates can do no harm."""

import json
import time
from pathlib import Path

import pytest
from space_router.errors import ConfigError, InvalidRequest
from space_router.text import template_budget
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


WASTEFUL = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "macros in a loop": "{% macro f() %}{% endmacro %}{% for i in range(99999) %}{% for j in range(99) %}{{ f() }}"
    "{% endfor %}{% endfor %}",
    "doubling by a variable": "{% set ns = namespace(s='x' * 99) %}{% for i in range(40) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling by sums": "{% set ns = namespace(s='x' * 99) %}{% for i in range(40) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling in a block": "{% set ns = namespace(s='x' * 99) %}{% for i in range(40) %}"
    "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}",
    "plain text in a loop": "{% set x %}{% for i in range(99999) %}" + "x" * 999 + "{% endfor %}{% endset %}",
    "a long product": "{{ 'x' * 10**9 }}",
    "a list of products": "{{ [1] * 10**9 }}",
    "a tower": "{{ 7**(9**9) }}",
    "a wide format": "{{ '%999999999d' % 1 }}",
    "a tool's schema for each letter": "{% for a in range(99999) %}{{ messages[0].content * 999 }}{% endfor %}",
}


@pytest.mark.parametrize("name", WASTEFUL)
def test_a_template_that_costs_too_much_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "MAX_STEPS", 20_000)  # long before a busy machine's clock
    template = ChatTemplate(WASTEFUL[name], {})
    with pytest.raises(InvalidRequest, match=r"loops more|writes more|larger than|recursion|more than \d+ characters"):
        template.render([{"role": "user", "content": "Hi " * 99}])


def test_filters_that_loop_by_themselves_are_stopped_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 0.05)
    template = ChatTemplate("{% for i in range(999) %}{% for j in range(9999) if false %}{% endfor %}{% endfor %}", {})
    with pytest.raises(InvalidRequest, match=r"longer than 0\.05 seconds"):
        template.render(TALK)


def test_a_conversation_of_many_long_messages_costs_nothing_to_speak_of() -> None:
    messages = [{"role": role, "content": "word " * 100} for role in ("user", "assistant")] * 2048
    assert len(ChatTemplate(BUILT_IN["chatml"], TOKENS).render(messages)) > 4096 * 500


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def test_a_template_for_tools_is_taken_where_there_are_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    own = find(tmp_path, None, {})
    assert own is not None
    assert (own.of([]).render(TALK), own.of([TOOL]).render(TALK, tools=[TOOL])) == ("plain", "1 tools")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("the file's")
    own = find(tmp_path, None, {})
    assert own is not None
    assert own.of([TOOL]).render(TALK, tools=[TOOL]) == "the file's"


def test_chatml_shows_tools_calls_and_results() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
    result = {"role": "tool", "content": "1", "tool_call_id": "a"}
    messages = [*TALK, {"role": "assistant", "content": "", "tool_calls": [call, call]}, result, result]
    text = ChatTemplate(BUILT_IN["chatml"], TOKENS).render(messages, tools=[TOOL])
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.dumps(TOOL["function"]) in text
    written = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{written}\n{written}<|im_end|>\n" in text
    response = "\n<tool_response>\n1\n</tool_response>"
    assert text.endswith(f"<|im_start|>user{response}{response}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ('a' * 1000) | replace('a', 'b' * 100000) }}",
        "{{ ('a' * 1000).replace('a', 'b' * 100000) }}",
        "{{ 'a' | center(99999999) }}",
        "{{ 'a'.ljust(99999999) }}",
        "{{ ('x\n' * 1000) | indent(99999) }}",
        "{{ '%99999999d' | format(1) }}",
        "{{ '{:>99999999}'.format(1) }}",
        "{{ [1] | batch(99999999, 'x') | list }}",
        "{{ {'a': [1]} | tojson(indent=99999999) }}",
        "{{ ('y' * 100000).join(['x'] * 1000) }}",
        "{{ ['x'] * 1000 | join('y' * 100000) }}",
        "{% for x in ('a' * 1000) | replace('a', 'b' * 100000) recursive %}{{ loop(x) }}{% endfor %}",
    ],
)
def test_little_is_not_made_much_by_a_filter_or_a_method(source: str) -> None:
    def seconds() -> float:
        begun = time.process_time()
        with pytest.raises(InvalidRequest):
            ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])
        return time.process_time() - begun

    assert any(seconds() < 2.0 for _ in range(3)), "the machine itself may stop now and then"


def test_what_only_python_finds_wrong_in_a_template_is_a_wrong_template() -> None:
    with pytest.raises(ConfigError, match="no valid Jinja template"):
        ChatTemplate("{% break %}", {})
    with pytest.raises(InvalidRequest, match="expected length"):
        ChatTemplate("{{ 'x' | truncate(-1) }}", {}).render([{"role": "user", "content": "hi"}])
