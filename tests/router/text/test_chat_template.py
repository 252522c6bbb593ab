"""Messages become the prompt their model was trained on; templates can do no harm."""

import importlib.resources
import json
import time
from pathlib import Path
from typing import Any

import pytest
from doubles.tokenizers import byte_level
from space_router.errors import ConfigError, InvalidRequest
from space_router.text.chat_template import BUILT_IN, ChatTemplate, find
from space_router.text.model_text import turn_end_ids
from space_router.text.template_messages import TemplateLimits
from space_router.text.tokenizer import Tokenizer
from tokenizers import AddedToken
from transformers.utils.chat_template_utils import render_jinja_template

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
    assert own.name == "chat_template.jinja"  # clients see it in errors
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    own = find(tmp_path, None, {})
    assert own is not None
    assert own.with_tools is not None
    assert own.with_tools.name == "additional_chat_templates/tool_use.jinja"
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
def test_a_template_that_costs_too_much_is_stopped(name: str) -> None:
    template = ChatTemplate(WASTEFUL[name], {}, limits=TemplateLimits(num_steps=20_000))
    with pytest.raises(InvalidRequest, match=r"loops more|writes more|larger than|recursion|more than \d+ characters"):
        template.render([{"role": "user", "content": "Hi " * 99}])


@pytest.mark.parametrize("written", ["{{ x }}", "x" * 1000])
def test_what_a_template_writes_counts_where_it_is_kept_and_never_shown(written: str) -> None:
    source = "{% set x = 'x' * 1000 %}{% for i in range(99) %}{% set y %}" + written + "{% endset %}{% endfor %}"
    assert ChatTemplate(source, {}, limits=TemplateLimits(num_written=200_000)).render(TALK) == ""
    with pytest.raises(InvalidRequest, match="writes more than 90000 characters"):
        ChatTemplate(source, {}, limits=TemplateLimits(num_written=90_000)).render(TALK)


def test_a_prompt_beyond_its_most_characters_is_the_requests_error() -> None:
    assert TemplateLimits().num_prompt == 16_777_216
    template = ChatTemplate("{{ messages[0].content }}", {}, limits=TemplateLimits(num_prompt=1000))
    assert template.render([{"role": "user", "content": "x" * 1000}]) == "x" * 1000
    with pytest.raises(InvalidRequest, match="more than 1000 characters"):
        template.render([{"role": "user", "content": "x" * 1001}])


def test_filters_that_loop_by_themselves_are_stopped_by_the_clock() -> None:
    source = "{% for i in range(999) %}{% for j in range(9999) if false %}{% endfor %}{% endfor %}"
    template = ChatTemplate(source, {}, limits=TemplateLimits(seconds=0.05))
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


# Templates of our own in the manner of the families whose name they have.
LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Today is ' + date_string + '.\\n\\n' + system }}
{%- if tools is not none %}
    {{- '\\nAnswer with {"name": function name, "parameters": its arguments}.\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- '\\n' }}
    {%- endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{{ bos_token }}
{%- set ns = namespace(last = -1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
    {%- if tools is not none and loop.index0 == ns.last %}
        {{- '[AVAILABLE_TOOLS] [' }}
        {%- for tool in tools %}
            {%- set tool = tool.function %}
            {{- '{"type": "function", "function": {' }}
            {%- for key, value in tool.items() if key != 'return' %}
                {%- if value is string %}
                    {{- '"' + key + '": "' + value + '"' }}
                {%- else %}
                    {{- '"' + key + '": ' + value | tojson }}
                {%- endif %}
                {%- if not loop.last %}{{- ', ' }}{% endif %}
            {%- endfor %}
            {{- '}}' }}
            {%- if not loop.last %}{{- ', ' }}{% endif %}
        {%- endfor %}
        {{- ']' + '[/AVAILABLE_TOOLS]' }}
    {%- endif %}
    {{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
    {{- '[TOOL_CALLS] [' }}
    {%- for call in message.tool_calls %}
        {%- set out = call.function | tojson %}
        {{- out[:-1] }}
        {%- if not call.id is defined or call.id | length != 9 %}
            {{- raise_exception('ids of calls have nine characters') }}
        {%- endif %}
        {{- ', "id": "' + call.id + '"}' }}
        {%- if not loop.last %}{{- ', ' }}{% else %}{{- ']' + eos_token }}{% endif %}
    {%- endfor %}
{%- elif message.role == 'assistant' %}
    {{- ' ' + message.content | trim + eos_token }}
{%- elif message.role == 'tool' %}
    {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {{- '[/TOOL_RESULTS]' }}
{%- elif message.role == 'system' %}
    {{- '[SYSTEM]' + message.content }}
{%- endif %}
{%- endfor %}
"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\nWrite <tool_call>{"name": <function-name>, "arguments": <args>}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function is defined %}{%- set call = call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- call.name }}
            {{- '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{% else %}{{- call.arguments | tojson }}{% endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0].role == 'system' -%}
    {%- if messages[0].content is string -%}
        {%- set first = messages[0].content + '\\n\\n' -%}
    {%- else -%}
        {%- set first = messages[0].content[0].text + '\\n\\n' -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('user and assistant must take turns') }}
    {%- endif -%}
    {%- set role = 'model' if message.role == 'assistant' else message.role -%}
    {{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
    {%- if message.content is string -%}
        {{ message.content | trim }}
    {%- elif message.content is iterable -%}
        {%- for item in message.content -%}
            {%- if item.type == 'text' -%}{{ item.text | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception('unknown content') }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

PARTS_ONLY = """\
{% for message in messages %}{{ message.role | capitalize }}:
{%- for part in message.content %}{% if part.type == 'text' %} {{ part.text }}{% else %}<image>{% endif %}{% endfor %}
<end>
{% endfor %}
{%- if add_generation_prompt %}Assistant:{% endif %}
"""

DEEPSEEK = """\
{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|User|>' + message.content }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{%- for call in message.tool_calls %}
{{- '<|call|>' + call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```' }}
{%- endfor %}
{%- elif message.role == 'assistant' %}
{%- generation %}{{ '<|Assistant|>' + message.content + eos_token }}{% endgeneration %}
{%- else %}{{ '<|' + message.role + '|>' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}
"""

EMBEDDED = (importlib.resources.files("space_demo") / "chat_template.jinja").read_text(encoding="utf-8")

SHAPES = {
    "llama-3": LLAMA_3, "mistral": MISTRAL, "qwen": QWEN, "gemma": GEMMA, "parts only": PARTS_ONLY,
    "deepseek": DEEPSEEK, "embedded": EMBEDDED, **{f"built-in {name}": source for name, source in BUILT_IN.items()},
}  # fmt: skip

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Zürich", "<b>"]}}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Says \"how\".", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {"type": "object"}}},
]  # fmt: skip


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(arguments: Any) -> list[dict[str, Any]]:
    """A question, one call and its result."""
    call = {"id": "abc123def", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    result = {"role": "tool", "content": "rain", "tool_call_id": "abc123def", "name": "get_weather"}
    return [user("And in Zürich?"), {**assistant(""), "tool_calls": [call]}, result]


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [user(" Hi <&> {{ x }} ")],
    "system": [{"role": "system", "content": "Be brief.\n"}, user("Hi"), assistant(" Yo "), user("Why?")],
    "calls": calls({"city": "Zürich", "n": [1, 2.5, None, True]}),
    "calls as text": calls('{"city": "Zürich"}'),
    "parts": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
    "twice": [user("a"), user("b")],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
def test_a_conversation_is_rendered_as_transformers_renders_it(
    shape: str, conversation: str, tools: list[dict[str, Any]]
) -> None:
    template = ChatTemplate(SHAPES[shape], TOKENS)
    messages = CONVERSATIONS[conversation]
    for variables in ({}, {"date_string": "1 May 2025"}, {"enable_thinking": False}):
        for prompt in (True, False):
            try:
                wanted = render_jinja_template(
                    [messages], tools or None, chat_template=SHAPES[shape], add_generation_prompt=prompt,
                    **TOKENS, **variables,
                )[0][0]  # fmt: skip
            except Exception:  # whatever a template raises
                with pytest.raises(InvalidRequest, match="does not take these messages"):
                    template.render(messages, tools=tools, add_generation_prompt=prompt, variables=variables)
                continue
            made = template.render(messages, tools=tools, add_generation_prompt=prompt, variables=variables)
            assert made == wanted


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("words", ["so it", "so it ", " so it\n", "so [it](is) $1"])
def test_the_last_message_is_continued_as_transformers_continues_it(shape: str, words: str) -> None:
    for content in (words, [{"type": "text", "text": "x"}, {"type": "text", "text": words}]):
        messages = [user("a"), assistant(content)]
        try:
            wanted = render_jinja_template(
                [messages], chat_template=SHAPES[shape], continue_final_message=True, **TOKENS
            )[0][0]  # fmt: skip
        except Exception:  # whatever a template raises
            continue
        if isinstance(content, list) and "'type'" in wanted:
            continue
        template = ChatTemplate(SHAPES[shape], TOKENS)
        made = template.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert made == wanted
        assert made.rstrip().endswith(words.strip())


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        template.render([user("a"), assistant("b")], continue_final_message=True)


HABITS = {  # takes tools, text, parts; wants arguments as text
    "llama-3": (True, True, False, False),
    "mistral": (True, True, False, False),
    "qwen": (True, True, False, False),
    "gemma": (False, True, True, False),
    "parts only": (False, False, True, False),
    "deepseek": (False, True, False, True),
    "built-in chatml": (True, True, False, False),
    "embedded": (True, True, False, False),
    "built-in vicuna": (False, True, False, False),
}


@pytest.mark.parametrize("shape", HABITS)
def test_a_template_is_asked_what_it_wants(shape: str) -> None:
    habits = ChatTemplate(SHAPES[shape], TOKENS).habits
    found = (habits.takes_tools, habits.takes_text, habits.takes_parts, habits.arguments_as_text)
    assert found == HABITS[shape]


def test_a_templates_variables_are_those_that_nobody_else_gives_it() -> None:
    assert ChatTemplate(QWEN, TOKENS).variables == {"enable_thinking"}
    assert "date_string" in ChatTemplate(LLAMA_3, TOKENS).variables
    assert not ChatTemplate(BUILT_IN["chatml"], TOKENS).variables


ADDED = (
    "<s>", "</s>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>",
    "<|end|>", "<|user|>", "<|assistant|>", "<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>",
    "<tool_call>",
)  # fmt: skip
INNER = byte_level()
INNER.add_tokens([AddedToken(token, special=token != "<tool_call>") for token in ADDED])
TOKENIZER = Tokenizer(INNER, {"bos_token": "<s>", "eos_token": "</s>"})

LOOP = "{% for m in messages %}"
TEMPLATES = {
    "llama-3": (
        LOOP + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}",
        {"<|eot_id|>"},
    ),
    "gemma": (
        LOOP + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n"
        "{% endfor %}",
        {"<end_of_turn>"},
    ),
    "phi-3": (LOOP + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}", {"<|end|>"}),
    "glm-4, where the next user's mark is the end": (
        LOOP + "<|{{ m.role }}|>\n{{ m.content }}{% endfor %}",
        {"<|user|>"},
    ),
    "parts of a message": (
        LOOP + "{% for part in m.content %}{{ part.text }}{% endfor %}<|eot_id|>{% endfor %}",
        {"<|eot_id|>"},
    ),
    "gpt-oss, which ends a thought with the token that ends a past answer": (
        LOOP + "{% if m.thinking is defined %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
        "{% endif %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}",
        {"<|return|>"},
    ),
    "words, an end and then a call": (
        LOOP + "<|{{ m.role }}|>{{ m.content }}<|end|>{% for call in m.tool_calls or [] %}<|call|>"
        "{{ call.function.name }}{% endfor %}</s>{% endfor %}",
        set(),
    ),
    "a call behind the words, before the end": (
        LOOP + "<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
        "{{ call.function.name }}</tool_call>{% endfor %}<|end|>{% endfor %}",
        {"<|end|>"},
    ),
    "text": (LOOP + "{{ m.role | upper }}: {{ m.content }}\n{% endfor %}", set()),
    "one that hides answers": (LOOP + "{% if m.role == 'user' %}{{ m.content }}</s>{% endif %}{% endfor %}", set()),
    "one that takes one message": (
        "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}</s>",
        set(),
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_token_that_a_template_writes_behind_an_answer_ends_a_turn(name: str) -> None:
    source, expected = TEMPLATES[name]
    ids = turn_end_ids(ChatTemplate(source, TOKENIZER.named_tokens), TOKENIZER)
    assert {INNER.id_to_token(id_) for id_ in ids} == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("vicuna", "</s>"), ("llama-2", "</s>"), ("chatml", "<|im_end|>"), ("alpaca", "</s>")]
)
def test_a_built_in_template_has_its_end(name: str, expected: str) -> None:
    ids = turn_end_ids(ChatTemplate(BUILT_IN[name], TOKENIZER.named_tokens), TOKENIZER)
    assert [INNER.id_to_token(id_) for id_ in ids] == [expected]


def test_a_template_for_tools_adds_its_ends() -> None:
    tools = ChatTemplate(LOOP + "{{ m.content }}<|eot_id|>{% endfor %}", {})
    both = ChatTemplate(LOOP + "{{ m.content }}<|end|>{% endfor %}", {}, with_tools=tools)
    assert {INNER.id_to_token(id_) for id_ in turn_end_ids(both, TOKENIZER)} == {"<|end|>", "<|eot_id|>"}


def test_a_template_that_is_a_link_out_of_its_folder_is_not_shown_to_clients(tmp_path: Path) -> None:
    folder, secret = tmp_path / "model", tmp_path / "secret"
    secret.write_text("the key")
    (folder / "additional_chat_templates").mkdir(parents=True)
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (folder / name).symlink_to(secret)
        with pytest.raises(ConfigError, match=r"is a link to .*secret, outside its folder") as refused:
            find(folder, None, {})
        assert "the key" not in str(refused.value)
        (folder / name).unlink()
    (folder / "own").write_text("own")
    (folder / "chat_template.jinja").symlink_to("own")
    own = find(folder, None, {})
    assert own is not None
    assert own.render(TALK) == "own"
