"""Every format of tool calls on at least twenty texts, whole and in any two pieces.

The texts are written as each family's template and model card write them, and as the tests of vLLM, SGLang and
llama.cpp have them: by `WRITERS`, which share nothing with the grammars of required calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from doubles.thinking import read_pieces
from space_router.text.tool_calls import ToolCallReader
from space_router.text.tool_parsers.formats import FORMATS

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
Call = tuple[str, dict[str, Any]]

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


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def keyed(name: str, arguments: dict[str, Any], *, name_key: str = "name", key: str = "arguments") -> str:
    return f'{{"{name_key}": "{name}", "{key}": {compact(arguments)}}}'


def listed(start: str, end: str, **keys: str) -> Callable[[list[Call]], str]:
    return lambda calls: f"{start}[{', '.join(keyed(*call, **keys) for call in calls)}]{end}"


def each(start: str, end: str, between: str = "", **keys: str) -> Callable[[list[Call]], str]:
    return lambda calls: between.join(f"{start}{keyed(*call, **keys)}{end}" for call in calls)


def text_or_json(value: Any) -> str:
    return value if isinstance(value, str) else compact(value)


def tags(
    block: tuple[str, str], call: tuple[str, str, str], value: Callable[[str, Any], str], *, one_block: bool = False
) -> Callable[[list[Call]], str]:
    def inner(name: str, arguments: dict[str, Any]) -> str:
        return f"{call[0]}{name}{call[1]}{''.join(value(key, one) for key, one in arguments.items())}{call[2]}"

    if one_block:
        return lambda calls: block[0] + "\n".join(inner(*one) for one in calls) + block[1]
    return lambda calls: "\n".join(block[0] + inner(*one) + block[1] for one in calls)


def dsml(word: str) -> Callable[[list[Call]], str]:
    def value(key: str, one: Any) -> str:
        is_text = str(isinstance(one, str)).lower()
        return f'<｜DSML｜parameter name="{key}" string="{is_text}">{text_or_json(one)}</｜DSML｜parameter>\n'

    call = ('<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n")
    return tags((f"<｜DSML｜{word}>\n", f"</｜DSML｜{word}>"), call, value, one_block=True)


def gemma(start: str, end: str, quote: str) -> Callable[[list[Call]], str]:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{written(one)}" for key, one in value.items()) + "}"
        if isinstance(value, list):
            return f"[{','.join(map(written, value))}]"
        return compact(value)

    return lambda calls: "".join(f"{start}call:{name}{written(arguments)}{end}" for name, arguments in calls)


def python(start: str, end: str, between: str) -> Callable[[list[Call]], str]:
    def call(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return lambda calls: start + between.join(call(*one) for one in calls) + end


NAME_SPACE = "]<]minimax[>["


def minimax_m3(calls: list[Call]) -> str:
    def tag(key: str, value: Any) -> str:
        return f"{NAME_SPACE}<{key}>{inner(value)}{NAME_SPACE}</{key}>"

    def inner(value: Any) -> str:
        if isinstance(value, dict):
            return "".join(tag(key, one) for key, one in value.items())
        if isinstance(value, list):
            return "".join(tag("item", one) for one in value)
        return text_or_json(value)

    written = "\n".join(
        f'{NAME_SPACE}<invoke name="{name}">{inner(arguments)}{NAME_SPACE}</invoke>' for name, arguments in calls
    )
    return f"{NAME_SPACE}<tool_call>\n{written}\n{NAME_SPACE}</tool_call>"


def deepseek(calls: list[Call]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{compact(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def deepseek_31(calls: list[Call]) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{compact(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def kimi(calls: list[Call]) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{compact(arguments)}<|tool_call_end|>"
        for place, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def harmony(calls: list[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{compact(arguments)}<|call|>"
        for name, arguments in calls
    )


def parameter(before: str, end: str, key_end: str = ">") -> Callable[[str, Any], str]:
    return lambda key, value: f"{before}{key}{key_end}{text_or_json(value)}{end}"


def command(calls: list[Call]) -> str:
    written = ",\n    ".join(
        f'{{"tool_call_id": "{place}", "tool_name": "{name}", "parameters": {compact(arguments)}}}'
        for place, (name, arguments) in enumerate(calls)
    )
    return f"<|START_ACTION|>[\n    {written}\n]<|END_ACTION|>"


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "hermes": each('<tool_call>\n', "\n</tool_call>", "\n"),
    "llama3_json": each("", "", "; ", key="parameters"),
    "mistral": listed("[TOOL_CALLS]", ""),
    "pythonic": python("[", "]", ", "),
    "qwen3_coder": tags(("<tool_call>\n", "\n</tool_call>"), ("<function=", ">\n", "</function>"),
                        parameter("<parameter=", "\n</parameter>\n", ">\n")),
    "glm45": tags(("", ""), ("<tool_call>", "\n", "</tool_call>"),
                  parameter("<arg_key>", "</arg_value>\n", "</arg_key>\n<arg_value>")),
    "deepseek_v3": deepseek,
    "deepseek_v31": deepseek_31,
    "kimi_k2": kimi,
    "openai": harmony,
    "granite": listed("<|tool_call|>", ""),
    "phi4_mini_json": listed("<|tool_call|>", "<|/tool_call|>"),
    "functools": listed("functools", ""),
    "nemotron_json": listed("<TOOLCALL>", "</TOOLCALL>"),
    "lfm2": python("<|tool_call_start|>[", "]<|tool_call_end|>", ", "),
    "seed_oss": tags(("<seed:tool_call>\n", "\n</seed:tool_call>"), ("<function=", ">\n", "</function>"),
                     parameter("<parameter=", "</parameter>\n")),
    "minimax_m2": tags(("<minimax:tool_call>\n", "\n</minimax:tool_call>"), ('<invoke name="', '">\n', "</invoke>"),
                       parameter('<parameter name="', "</parameter>\n", '">'), one_block=True),
    "gemma4": gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "cohere_command3": command,
    "command_r": listed("Action:\n```json\n", "\n```", name_key="tool_name", key="parameters"),
    "minimax_m3": minimax_m3,
    "minimax": lambda calls: "<tool_calls>\n" + "\n".join(keyed(*call) for call in calls) + "\n</tool_calls>",
    "hunyuan_a13b": listed("<tool_calls>", "</tool_calls>"),
    "apertus": lambda calls: "<|tools_prefix|>[" + ", ".join(
        f'{{"{name}": {compact(arguments)}}}' for name, arguments in calls) + "]<|tools_suffix|>",
    "olmo3": python("<function_calls>", "</function_calls>", "\n"),
    "xlam": listed("", ""),
    "gigachat3": each("<|function_call|>", ""),
    "solar_open2": lambda calls: "".join(
        f"<|tool_call:begin|>id{place}<|tool_call:name|>{name}<|tool_call:args|>{compact(arguments)}<|tool_call:end|>"
        for place, (name, arguments) in enumerate(calls)),
    "longcat": each("<longcat_tool_call>\n", "\n</longcat_tool_call>", "\n"),
    "internlm": each("<|action_start|><|plugin|>\n", "<|action_end|>", "\n", key="parameters"),
    "functionary_v31": lambda calls: "".join(
        f"<function={name}>{compact(arguments)}</function>" for name, arguments in calls),
    "muse_glimmer": tags(("<atem:function_calls>\n", "\n</atem:function_calls>"),
                         ('<atem:invoke name="', '">\n', "</atem:invoke>"),
                         parameter('<atem:parameter name="', "</atem:parameter>\n", '">'), one_block=True),
}  # fmt: skip

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
}  # fmt: skip

CASES = [(name, number) for name in WRITERS for number in range(len(texts_of(name)))]


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
