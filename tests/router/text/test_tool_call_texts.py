"""Every format of tool calls on at least twenty texts, whole and in any two pieces.

The texts are written as each family's template and model card write them, and as the tests of vLLM, SGLang and
llama.cpp have them: by `WRITERS`, which share nothing with the grammars of required calls.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest
from doubles.thinking import read_pieces
from doubles.tool_call_writers import NAME_SPACE, WRITERS, Call, dsml, keyed, minimax_m3
from space_router.text.tool_calls import ToolCallReader
from space_router.text.tool_parsers.formats import FORMATS, named, recognised

ANY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "state": {"type": "string"}, "metric": {"type": "string"},
        "name": {"type": "string"}, "age": {"type": "integer"}, "address": {"type": "object"},
        "role": {"type": ["string", "null"]}, "passed_test": {"type": "boolean"}, "aliases": {"type": "array"},
        "score": {"type": "number"}, "code": {"type": "string"}, "steps": {"type": "array"}, "data": {"type": "object"},
    },
}  # fmt: skip
TOOLS = dict.fromkeys(("get_weather", "register_user", "get_time", "do_something_cool", "get-it"), ANY)

SIMPLE: Call = ("get_weather", {"city": "San Francisco", "metric": "celsius"})
TYPES: Call = (
    "register_user",
    {
        "name": "John Doe",
        "age": 37,
        "address": {"city": "San Francisco", "state": "CA"},
        "role": None,
        "passed_test": True,
        "aliases": ["John", "Johnny"],
    },
)
NONE: Call = ("get_time", {})
EMPTY_OBJECT: Call = ("do_something_cool", {"data": {}})
EMPTY_LIST: Call = ("do_something_cool", {"steps": []})
QUOTES: Call = ("get_weather", {"city": "Martha's Vineyard", "metric": '"cool units"'})
UNICODE: Call = ("get_weather", {"city": "北京 🌧 Zürich"})
NUMBERS: Call = ("register_user", {"name": "x", "age": -12, "score": 3.25})
CODE: Call = ("do_something_cool", {"code": 'def f(x):\n    return {"a": [x, "}"]}  # \\n\n\tprint("é")'})
DEEP: Call = ("do_something_cool", {"data": {"a": {"b": [{"c": [1, 2, {"d": "e"}]}, False, None]}}})
EMPTY_TEXT: Call = ("get_weather", {"city": ""})
HYPHEN: Call = ("get-it", {"city": "Dallas, TX", "age": 0})

WHOLE: list[list[Call]] = [
    [SIMPLE], [TYPES], [NONE], [EMPTY_OBJECT], [EMPTY_LIST], [QUOTES], [UNICODE], [NUMBERS], [CODE], [DEEP],
    [EMPTY_TEXT], [HYPHEN], [SIMPLE, TYPES], [NONE, SIMPLE], [SIMPLE, SIMPLE, NONE],
]  # fmt: skip


AT_START = {"pythonic", "xlam"}  # nothing stands before calls
UNABLE: dict[str, list[Call]] = {"pythonic": [HYPHEN], "lfm2": [HYPHEN], "olmo3": [HYPHEN]}
"""What a format cannot write: Python has no names with a hyphen."""


class Text(NamedTuple):
    text: str
    content: str
    calls: list[Call]


def texts_of(name: str) -> list[Text]:
    write = WRITERS[name]
    found = [
        Text(write(calls), "", calls) for calls in WHOLE if not any(call in UNABLE.get(name, []) for call in calls)
    ]
    unknown = write([("nobody", {"city": "x"})])
    found += [Text("How can I help you today?", "How can I help you today?", []), Text("", "", [])]
    if name == "kimi_k3":  # what stands around calls is no content, whatever they call
        unknown = unknown.removeprefix("<|open|>tools<|sep|>").removesuffix("<|close|>tools<|sep|>")
    if name != "openai":  # its text outside a message is none
        found.append(Text(unknown, unknown, []))
        found.append(Text("[1, 2] {'a': 3} <b>bold</b> f(x)", "[1, 2] {'a': 3} <b>bold</b> f(x)", []))
    else:
        found.append(Text("<|channel|>final<|message|>It is hot.", "It is hot.", []))
        found.append(
            Text("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + write([NONE]), "I look.", [NONE])
        )
    if name not in AT_START and name != "openai":
        found.append(Text("I'll check that.\n" + write([SIMPLE]), "I'll check that.", [SIMPLE]))
        found.append(Text("天气 <i> {}\n" + write([NONE, TYPES]), "天气 <i> {}", [NONE, TYPES]))
    found += FURTHER.get(name, [])
    return found


FURTHER: dict[str, list[Text]] = {
    "openai": [
        Text(
            '<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{}<|call|>', "", [NONE]
        ),
        Text("<|channel|>final<|message|>A <b> {} [1].<|return|>", "A <b> {} [1].", []),
    ],
    "xlam": [
        Text(f"I'll help you.\n```json\n[{keyed(*SIMPLE)}]\n```", "I'll help you.", [SIMPLE]),
        Text(f"```json\n[{keyed(*SIMPLE)}, {keyed(*NONE)}]\n```", "", [SIMPLE, NONE]),
        Text("```json\n[1]\n```", "```json\n[1]\n```", []),
    ],
    "pythonic": [
        Text("<|python_start|>[get_time()]<|python_end|>", "", [NONE]),
        Text("[get_weather(city='San Francisco', metric=\"celsius\")]", "", [SIMPLE]),
        Text("[do_something_cool(data={}), get_time()]", "", [EMPTY_OBJECT, NONE]),
        Text("[register_user(name='x', age=-12, score=3.25)]", "", [NUMBERS]),
        Text("[get_weather(city=here)]", "[get_weather(city=here)]", []),
    ],
    "lfm2": [
        Text('<|tool_call_start|>[get_weather(city="San Francisco", metric="celsius")]<|tool_call_end|>ok', "ok",
             [SIMPLE]),
    ],
    "olmo3": [
        Text("<function_calls>\nget_time()\n</function_calls>", "", [NONE]),
        Text("<function_calls>get_weather(city=here)</function_calls>",
             "<function_calls>get_weather(city=here)</function_calls>", []),
    ],
    "gemma4": [
        Text("<|tool_call>call:do_something_cool{data:{<|\"|>3<|\"|>:<|\"|>new<|\"|>}}<tool_call|>", "",
             [("do_something_cool", {"data": {"3": "new"}})]),
        Text("<|tool_call>call:get_time<tool_call|>", "<|tool_call>call:get_time<tool_call|>", []),
    ],
    "deepseek_v32": [
        Text(dsml("function_calls")([("get_weather", {"city": "42"})]), "", [("get_weather", {"city": "42"})]),
        Text(dsml("function_calls")([NUMBERS]).replace('string="false"', 'string="true"'), "", [NUMBERS]),
    ],
    "minimax_m3": [
        Text(minimax_m3([("register_user", {"name": "x", "address": {"zip": 18956, "tag": ["a", "b"]}})]).replace(
            f"{NAME_SPACE}<item>", f"{NAME_SPACE}<item>"), "",
            [("register_user", {"name": "x", "address": {"zip": 18956, "tag": ["a", "b"]}})]),
    ],
    "cohere_command3": [
        Text('<|START_ACTION|>\n[\n    {"tool_call_id": "0", "tool_name": "get_time", "parameters": {}}\n]\n'
             "<|END_ACTION|>", "", [NONE]),
    ],
    "minicpm5": [
        Text('<function name="get_weather"><param name="city"><![CDATA[a</param></function>\n]]></param></function>',
             "",
             [("get_weather", {"city": "a</param></function>\n"})]),
        Text('<function name="get_weather"><param name="city"><![CDATA[]]]]></param></function>', "",
             [("get_weather", {"city": "]]"})]),
    ],
    "hy_v3": [
        Text("<tool_calls><tool_call>get_time<tool_sep></tool_call></tool_calls>", "", [NONE]),
        Text("<tool_call>get_weather<tool_sep><arg_key>city</arg_key><arg_value>42</arg_value></tool_call>", "",
             [("get_weather", {"city": "42"})]),
    ],
    "kimi_k3": [
        Text("<|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool=\"get_time\" "
             'index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>', "I look.", [NONE]),
        Text('<|open|>call tool="get_time" index="1"<|sep|><|open|>json type="object"<|sep|>{"city": "x"}<|close|>json'
             "<|sep|><|close|>call<|sep|>", "", [("get_time", {"city": "x"})]),
        Text('<|open|>call tool="get_time"<|sep|><|open|>argument key="a &amp; &quot;b&quot;" type="number"<|sep|>3'
             "<|close|>argument<|sep|><|close|>call<|sep|>", "", [("get_time", {'a & "b"': 3})]),
        Text("Hello.<|close|>response<|sep|><|close|>message<|sep|>", "Hello.", []),
        Text("<|open|>call me<|sep|>", "<|open|>call me<|sep|>", []),
    ],
    "functionary_v32": [
        Text('get_weather\n{"city": "x"}', "", [("get_weather", {"city": "x"})]),
        Text("all\nHow can I help?", "How can I help?", []),
        Text("all\nI look.>>>get_time\n{}", "I look.", [NONE]),
        Text(">>>all\nA >> b >>> c\n", "A >> b >>> c\n", []),
        Text(">>>get_time\nnow", ">>>get_time\nnow", []),
    ],
}  # fmt: skip

CASES = [(name, number) for name in WRITERS for number in range(len(texts_of(name)))]


def test_tags_of_hy3_may_have_a_suffix_that_the_template_gives() -> None:
    known = named("hy_v3", "{%- set HYTK = ':opensource' %}")
    for text, content, calls in texts_of("hy_v3"):
        long = re.sub(r"<(/?\w+)>", r"<\1:opensource>", text)
        _, found, read_calls = read_pieces(ToolCallReader(known.form, TOOLS), [long])
        assert [(tool, json.loads(arguments)) for tool, arguments in read_calls] == calls
        assert calls == [] or found == content.replace("<i>", "<i:opensource>")


def test_calls_of_gigachat_may_be_a_turn_of_their_own() -> None:
    known = recognised("{{ {'role': 'function call', 'content': '...'} }}")
    assert known is not None
    text = 'I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get_time", "arguments": {}}'
    reader = ToolCallReader(known.form, TOOLS)
    assert read_pieces(reader, list(text))[1:] == ("I look.", [("get_time", "{}")])


def read(name: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    _, content, calls = read_pieces(ToolCallReader(FORMATS[name].form, TOOLS), pieces)
    return content, calls


def test_every_format_has_twenty_texts() -> None:
    assert WRITERS.keys() == FORMATS.keys()
    assert {name: len(texts_of(name)) for name in WRITERS if len(texts_of(name)) < 20} == {}


@pytest.mark.parametrize("name", WRITERS)
def test_texts_are_content_and_calls_whole_and_in_any_two_pieces(name: str) -> None:
    for text, content, calls in texts_of(name):
        whole = read(name, [text])
        assert (whole[0], [(tool, json.loads(arguments)) for tool, arguments in whole[1]]) == (content, calls), text
        for place in range(1, len(text)):
            assert read(name, [text[:place], text[place:]]) == whole, (text, place)
        assert read(name, list(text)) == whole, text


@pytest.mark.parametrize("name", WRITERS)
def test_of_a_text_that_is_cut_the_calls_are_parts_of_the_whole_ones(name: str) -> None:
    for text, _, _ in texts_of(name):
        whole = read(name, [text])[1]
        for place in range(0, len(text), 7):
            for (tool, arguments), (full_tool, full) in zip(read(name, [text[:place]])[1], whole, strict=False):
                assert tool == full_tool
                assert full.startswith(arguments), (text, place)
