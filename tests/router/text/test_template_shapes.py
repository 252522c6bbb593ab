"""The shapes that chat templates have: each is rendered as transformers renders it, and asked what it wants."""

import importlib.resources
from typing import Any

import pytest
from space_router.errors import InvalidRequest
from space_router.text.chat_template import BUILT_IN, ChatTemplate
from transformers.utils.chat_template_utils import render_jinja_template

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
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

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
