"""Writers of tool calls, as each family's template has them. They share nothing with the grammars of required calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Call = tuple[str, dict[str, Any]]  # the tool's name and its arguments


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def keyed(name: str, arguments: dict[str, Any], *, name_key: str = "name", key: str = "arguments") -> str:
    return f'{{"{name_key}": "{name}", "{key}": {compact(arguments)}}}'


def listed(start: str, end: str, **keys: str) -> Callable[[list[Call]], str]:
    return lambda calls: f"{start}[{', '.join(keyed(call[0], call[1], **keys) for call in calls)}]{end}"


def each(start: str, end: str, between: str = "", **keys: str) -> Callable[[list[Call]], str]:
    return lambda calls: between.join(f"{start}{keyed(call[0], call[1], **keys)}{end}" for call in calls)


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


KINDS = {bool: "boolean", type(None): "null", int: "number", float: "number", str: "string", dict: "object"}


def kimi_k3(calls: list[Call]) -> str:
    def tag(name: str, inner: str, **attributes: Any) -> str:
        written = "".join(
            f' {key}="{str(value).replace("&", "&amp;").replace(chr(34), "&quot;")}"'
            for key, value in attributes.items()
        )
        return f"<|open|>{name}{written}<|sep|>{inner}<|close|>{name}<|sep|>"

    def inner(arguments: dict[str, Any]) -> str:
        return "".join(
            tag("argument", text_or_json(value), key=key, type=KINDS.get(type(value), "array"))
            for key, value in arguments.items()
        )

    called = "".join(
        tag("call", inner(arguments), tool=name, index=place) for place, (name, arguments) in enumerate(calls, 1)
    )
    return tag("tools", called)


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
    "minicpm5": tags(("", ""), ('<function name="', '">', "</function>"), lambda key, value: (
        f'<param name="{key}"><![CDATA[{value}]]></param>' if isinstance(value, str) and set(value) & set("<&\n")
        else f'<param name="{key}">{value}</param>')),
    "hy_v3": tags(("<tool_calls>\n", "\n</tool_calls>"), ("<tool_call>", "<tool_sep>\n", "</tool_call>"),
                  parameter("<arg_key>", "</arg_value>\n", "</arg_key>\n<arg_value>"), one_block=True),
    "kimi_k3": kimi_k3,
    "functionary_v32": lambda calls: "".join(f">>>{name}\n{compact(arguments)}" for name, arguments in calls),
}  # fmt: skip
