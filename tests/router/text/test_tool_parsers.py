"""Calls in the formats of the families, as their templates and model cards show them, in whatever pieces they come."""

import json
from typing import Any, NamedTuple

import pytest
from doubles.thinking import read_pieces
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from space_common.grammar import compile_grammar
from space_router.config import TOOL_CALL_PARSERS
from space_router.text.tokenizer import SpecialTokens
from space_router.text.tool_calls import CallPiece, ToolCallReader, calls_only, calls_or
from space_router.text.tool_parsers.formats import FORMATS, recognised


class Read(NamedTuple):
    """All that was said in a text: content, and (name, arguments) of each call."""

    content: str
    calls: list[tuple[str, str]]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class Bytes:
    """A vocabulary of single bytes, and EOS."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


NO_SPECIAL = SpecialTokens({})


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"type": ["object", "null"]},
        "any": {},
    },
    "required": ["city"],
}
TOOLS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}}, "run": {}}


def read(name: str, pieces: list[str], tools: Any = TOOLS) -> tuple[Read, bool]:
    reader = ToolCallReader(FORMATS[name].form, tools)
    _, content, calls = read_pieces(reader, pieces)
    return Read(content, calls), reader.output.is_whole


def until(text: str, last: str) -> str:
    """A text that is cut behind `last`."""
    return text[: text.index(last) + len(last)]


def qwen(name: str, **values: str) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def glm(name: str, *, lines: bool = True, **values: str) -> str:
    end = "\n" if lines else ""
    pairs = values.items()
    written = "".join(f"<arg_key>{key}</arg_key>{end}<arg_value>{value}</arg_value>{end}" for key, value in pairs)
    return f"<tool_call>{name}{end}{written}</tool_call>"


def v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def deepseek(*calls: str, between: str = "\n") -> str:
    return f"<｜tool▁calls▁begin｜>{between.join(calls)}<｜tool▁calls▁end｜>"


def kimi(*calls: tuple[str, str]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for place, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def seed(name: str, **values: str) -> str:
    written = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in values.items())
    return f"<seed:tool_call>\n<function={name}>\n{written}</function>\n</seed:tool_call>"


def minimax(name: str, **values: str) -> str:
    written = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{written}</invoke>\n</minimax:tool_call>'


def harmony(name: str, arguments: str, *, role: bool = False) -> str:
    if role:
        return f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>"
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


CODE = 'def f(x):\n    return "<b>" + x  # \\n\n\nprint(f("é"))'
CITY = ("get_weather", '{"city": "Dallas"}')
JSON_CALL = '{"name": "get_weather", "arguments": {"city": "Dallas"}}'
TEXTS: list[tuple[str, str, Read]] = [
    ("qwen3_coder", "No call <tool_call> here", Read("No call <tool_call> here", [])),
    ("qwen3_coder", qwen("get_weather", city="Dallas"), Read("", [CITY])),
    ("qwen3_coder", "Let me look.\n\n" + qwen("get_weather", city="Dallas"), Read("Let me look.", [CITY])),
    ("qwen3_coder", qwen("now"), Read("", [("now", "{}")])),
    ("qwen3_coder", qwen("get_weather", city="Dallas", days="3", exact="true"),
     Read("", [("get_weather", '{"city": "Dallas", "days": 3, "exact": true}')])),
    ("qwen3_coder", qwen("get_weather", city="42", units="celsius"),
     Read("", [("get_weather", '{"city": "42", "units": "celsius"}')])),
    ("qwen3_coder", qwen("get_weather", tags='["a", "b"]', where='{"lat": 1.50}'),
     Read("", [("get_weather", '{"tags": ["a", "b"], "where": {"lat": 1.50}}')])),
    ("qwen3_coder", qwen("get_weather", exact="True", where="None"),
     Read("", [("get_weather", '{"exact": true, "where": null}')])),
    ("qwen3_coder", qwen("get_weather", days="many"), Read("", [("get_weather", '{"days": "many"}')])),
    ("qwen3_coder", qwen("run", code=CODE), Read("", [("run", json.dumps({"code": CODE}, ensure_ascii=False))])),
    ("qwen3_coder", qwen("get_weather", city=CODE),
     Read("", [("get_weather", json.dumps({"city": CODE}, ensure_ascii=False))])),
    ("qwen3_coder", qwen("get_weather", city="Dallas") + "\n" + qwen("now"), Read("", [CITY, ("now", "{}")])),
    ("qwen3_coder", qwen("get_weather", city="Dallas").removeprefix("<tool_call>\n"), Read("", [CITY])),
    ("qwen3_coder", qwen("nobody", a="1"), Read(qwen("nobody", a="1"), [])),
    ("qwen3_coder", "<function=get_weather", Read("<function=get_weather", [])),
    ("qwen3_coder", until(qwen("get_weather", city="Dallas"), "=city>\nDa"),
     Read("", [("get_weather", '{"city": "Da')])),
    ("qwen3_coder", until(qwen("get_weather", city="Dallas", days="3"), "Dallas\n</parameter>\n<par"),
     Read("", [("get_weather", '{"city": "Dallas"')])),
    ("qwen3_coder", qwen("get_weather", city="a</param"), Read("", [("get_weather", '{"city": "a</param"}')])),
    ("qwen3_coder", qwen("get_weather", city="\n\nDallas\n"),
     Read("", [("get_weather", '{"city": "\\n\\nDallas\\n"}')])),
    ("qwen3_coder", qwen("get_weather", city=""), Read("", [("get_weather", '{"city": ""}')])),
    ("qwen3_coder", qwen("get_weather", any="[1, 2]"), Read("", [("get_weather", '{"any": [1, 2]}')])),
    ("glm45", glm("get_weather", city="Dallas"), Read("", [CITY])),
    ("glm45", glm("get_weather", lines=False, city="Dallas"), Read("", [CITY])),
    ("glm45", "I look.\n" + glm("get_weather", city="Dallas", days="3"),
     Read("I look.", [("get_weather", '{"city": "Dallas", "days": 3}')])),
    ("glm45", glm("now"), Read("", [("now", "{}")])),
    ("glm45", glm("now", lines=False), Read("", [("now", "{}")])),
    ("glm45", glm("get_weather", city="Dallas") + "\n" + glm("now"), Read("", [CITY, ("now", "{}")])),
    ("glm45", glm("get_weather", city="42", exact="false", tags='["x"]'),
     Read("", [("get_weather", '{"city": "42", "exact": false, "tags": ["x"]}')])),
    ("glm45", glm("run", code=CODE), Read("", [("run", json.dumps({"code": CODE}, ensure_ascii=False))])),
    ("glm45", glm("nobody", a="1"), Read(glm("nobody", a="1"), [])),
    ("glm45", "<tool_call>get_weather is a tag", Read("<tool_call>get_weather is a tag", [])),
    ("glm45", until(glm("get_weather", city="Dallas"), "Dal"), Read("", [("get_weather", '{"city": "Dal')])),
    ("deepseek_v3", deepseek(v3("get_weather", '{"city": "Dallas"}')), Read("", [CITY])),
    ("deepseek_v3", "Hm. " + deepseek(v3("get_weather", '{"city": "Dallas"}'), v3("now", "{}")),
     Read("Hm.", [CITY, ("now", "{}")])),
    ("deepseek_v3", deepseek(v3("get_weather", '{\n "city": "```"\n}')),
     Read("", [("get_weather", '{\n "city": "```"\n}')])),
    ("deepseek_v3", deepseek(v3("nobody", "{}")), Read(deepseek(v3("nobody", "{}")), [])),
    ("deepseek_v3", v3("get_weather", '{"city": "Dallas"}'), Read("", [CITY])),
    ("deepseek_v3", until(deepseek(v3("get_weather", '{"city": "Dal')), '{"city":'),
     Read("", [("get_weather", '{"city":')])),
    ("deepseek_v31", deepseek(v31("get_weather", '{"city": "Dallas"}'), v31("now", "{}"), between=""),
     Read("", [CITY, ("now", "{}")])),
    ("deepseek_v31", "Hm." + deepseek(v31("get_weather", '{"city": "Dallas"}')), Read("Hm.", [CITY])),
    ("kimi_k2", kimi(CITY), Read("", [CITY])),
    ("kimi_k2", "I look. " + kimi(CITY, ("now", "{}")), Read("I look.", [CITY, ("now", "{}")])),
    ("kimi_k2", kimi(("nobody", "{}")), Read(kimi(("nobody", "{}")), [])),
    ("kimi_k2", until(kimi(CITY), '{"city"'), Read("", [("get_weather", '{"city"')])),
    ("openai", harmony("get_weather", '{"city": "Dallas"}'), Read("", [CITY])),
    ("openai", harmony("get_weather", '{"city": "Dallas"}', role=True), Read("", [CITY])),
    ("openai", "<|channel|>final<|message|>It is hot.", Read("It is hot.", [])),
    ("openai", "<|channel|>commentary<|message|>I look.<|end|>" + harmony("now", "{}", role=True),
     Read("I look.", [("now", "{}")])),
    ("openai", until(harmony("get_weather", '{"city": "Dal'), '{"city'), Read("", [("get_weather", '{"city')])),
    ("openai", harmony("nobody", "{}"), Read("{}", [])),
    ("granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Dallas"}}]', Read("", [CITY])),
    ("granite", f'<|tool_call|> [{JSON_CALL}, {{"name": "now", "arguments": {{}}}}]',
     Read("", [CITY, ("now", "{}")])),
    ("granite", "<|tool_call|>[]", Read("<|tool_call|>[]", [])),
    ("phi4_mini_json", f"<|tool_call|>[{JSON_CALL}]<|/tool_call|>",
     Read("", [CITY])),
    ("functools", 'functools[{"name": "get_weather", "arguments": {"city": "Dallas"}}]', Read("", [CITY])),
    ("functools", "functools are nice", Read("functools are nice", [])),
    ("nemotron_json", f"<TOOLCALL>[{JSON_CALL}]</TOOLCALL>", Read("", [CITY])),
    ("lfm2", 'Sure. <|tool_call_start|>[get_weather(city="Dallas"), now()]<|tool_call_end|>',
     Read("Sure.", [CITY, ("now", "{}")])),
    ("lfm2", "<|tool_call_start|>[nobody()]<|tool_call_end|>",
     Read("<|tool_call_start|>[nobody()]<|tool_call_end|>", [])),
    ("seed_oss", seed("get_weather", city="Dallas", days="3"),
     Read("", [("get_weather", '{"city": "Dallas", "days": 3}')])),
    ("seed_oss", "Hm.\n" + seed("now"), Read("Hm.", [("now", "{}")])),
    ("minimax_m2", minimax("get_weather", city="Dallas", days="3"),
     Read("", [("get_weather", '{"city": "Dallas", "days": 3}')])),
    ("minimax_m2", minimax("get_weather", city="Dallas").replace("</mini", '<invoke name="now">\n</invoke>\n</mini'),
     Read("", [CITY, ("now", "{}")])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "wanted"), TEXTS)
def test_a_text_is_content_and_calls_whole_and_in_any_two_pieces(name: str, text: str, wanted: Read) -> None:
    found, whole = read(name, [text])
    assert found == wanted
    assert whole == (not wanted.calls or is_json(wanted.calls[-1][1]))
    for place in range(len(text) + 1):
        assert read(name, [text[:place], text[place:]])[0] == wanted, place
    assert read(name, list(text))[0] == wanted


@pytest.mark.parametrize(("name", "text"), [row[:2] for row in TEXTS])
def test_wherever_a_text_is_cut_its_calls_are_parts_of_the_whole_ones(name: str, text: str) -> None:
    whole = read(name, [text])[0].calls
    for place in range(0, len(text), 3):
        for (tool, arguments), (full_tool, full) in zip(read(name, [text[:place]])[0].calls, whole, strict=False):
            assert tool == full_tool
            assert full.startswith(arguments)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\\n<function=f>\\n<parameter=a>", "qwen3_coder"),
        ("<tool_call>{function-name}\\n<arg_key>", "glm45"),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '\\n' + '```json'}}", "deepseek_v3"),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name}}", "deepseek_v31"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|channel|>commentary to=functions.x", "openai"),
        ("respond only with <|tool_call|> followed by a JSON list", "granite"),
        ("<|tool_call|>[...]<|/tool_call|>", "phi4_mini_json"),
        ("<TOOLCALL>[", "nemotron_json"),
        ("<|tool_call_start|>", "lfm2"),
        ("<seed:tool_call>\\n<function=", "seed_oss"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("{%- set ns_token = ']<]minimax[>[' -%}{%- set begin = ns_token ~ '<tool_call>' -%}", "minimax_m3"),
        ("'\\nin this format:\\n<{start_tag}={function_name}>{parameters}{end_tag}' <|python_tag|>", "functionary_v31"),
        ('function_call="<|function_call|>" {{- \'{"name": "\' ~ call[\'name\'] ~ \'", "arguments": \'', "gigachat3"),
        ("{'role': 'function call', 'content': '{\"name\": \"'}", "gigachat3"),
        (
            '<|START_ACTION|>[ {"tool_call_id": "0", "tool_name": "x", "parameters": {}} ]<|END_ACTION|>',
            "cohere_command3",
        ),
        ("'\\nAction:\\n```json\\n[\\n'", "command_r"),
        ("'<atem:function_calls>\\n<atem:invoke name='", "muse_glimmer"),
        ("set dsml_token = '｜DSML｜' '<' + dsml_token + 'function_calls>'", "deepseek_v32"),
        ("set dsml_token = '｜DSML｜' '<' + dsml_token + 'tool_calls>'", "deepseek_v4"),
        ("'<|tool_call>call:' + function['name'] + '{'", "gemma4"),
        ("<start_function_call>call:", "functiongemma"),
        ("set tool_calls_token = '<|tools_prefix|>'", "apertus"),
        ('<tool_calls>\\n{"name": <tool-name>', "minimax"),
        ('<tool_calls>[{"name": <function-name-1>', "hunyuan_a13b"),
        ("<function_calls>", "olmo3"),
        ("<|tool_call:begin|>", "solar_open2"),
        ("<longcat_tool_call>", "longcat"),
        ("<|action_start|><|plugin|>", "internlm"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name', "llama3_json"),
        ("'\\nRespond in this format:\\n>>>${recipient}\\n${content}\\n'", "functionary_v32"),
        ("{{- '<function name=\"' ~ tool_call.name ~ '\">' }}", "minicpm5"),
        (
            "{%- set toolcalls = '<tool_calls{}>'.format(HYTK) %}{%- set toolsep = '<tool_sep{}>'.format(HYTK) %}",
            "hy_v3",
        ),
        ("'<tool_calls>\\n' '<tool_call>' + name + '<tool_sep>\\n<arg_key>'", "hy_v3"),
        ("ns.system_prompt + 'List of tools: [' -%}", "lfm2"),
        ("open_tag('call', [('tool', fn.name)]) '<|open|>' + tag + '<|sep|>'", "kimi_k3"),
    ],
)
def test_the_format_is_recognised_by_the_template(template: str, name: str) -> None:
    known = recognised(template)
    assert known is not None
    assert known.name == name


@pytest.mark.parametrize(
    "template",
    [
        '{"name": "{{ tool.name }}", "description": "{{ tool.description }}", "parameters": {{ tool.parameters }}}',
        "{{ tools | tojson }}",
        "<|tool_list_begin|>{%- for call in message.tool_calls %}>>>{{ call.function.name }}",
    ],
)
def test_tools_that_are_listed_tell_of_no_format(template: str) -> None:
    assert recognised(template) is None


def test_the_flag_has_every_format() -> None:
    assert sorted(TOOL_CALL_PARSERS) == sorted(FORMATS)


def allows(grammar: str, text: str) -> bool:
    matcher: LLMatcher = compile_grammar(TOKENIZER, "lark", grammar)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("name", "write"), [("qwen3_coder", qwen), ("glm45", glm), ("seed_oss", seed), ("minimax_m2", minimax)]
)
def test_required_parameters_and_their_types_are_enforced_in_tags(name: str, write: Any) -> None:
    layout = FORMATS[name].layout
    assert layout is not None
    only = calls_only(layout, TOOLS, NO_SPECIAL, many=True)
    assert allows(only, write("get_weather", city="Dallas", days="3", units="celsius", tags='["a"]'))
    assert allows(only, write("get_weather", city="a < b\n<c>"))
    assert allows(only, write("now"))
    assert allows(only, write("now") + "\n" + write("get_weather", city="x"))
    assert not allows(only, write("get_weather", days="3"))
    assert not allows(only, write("get_weather", city="Dallas", days="many"))
    assert not allows(only, write("get_weather", city="Dallas", units="kelvin"))
    assert not allows(only, write("nobody"))
    beside = calls_or(None, layout, TOOLS, NO_SPECIAL, many=False)
    assert allows(beside, "No call.")
    assert allows(beside, "One: " + write("get_weather", city="Dallas"))
    assert not allows(beside, write("now") + "\n" + write("now"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deepseek_v3", deepseek(v3(*CITY), v3("now", "{}"))),
        ("deepseek_v31", deepseek(v31(*CITY), v31("now", "{}"), between="")),
        ("kimi_k2", kimi(CITY)),
        ("openai", harmony(*CITY).removesuffix("<|call|>")),
        ("granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Dallas"}}]'),
    ],
)
def test_calls_are_required_as_the_family_writes_them(name: str, text: str) -> None:
    layout = FORMATS[name].layout
    assert layout is not None
    grammar = calls_only(layout, TOOLS, NO_SPECIAL, many=True)
    assert allows(grammar, text)
    assert not allows(grammar, "It is hot.")
    assert not allows(grammar, text.replace("Dallas", '"'))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "minicpm5",
            '<function name="get_weather"><param name="city"><![CDATA[a</param>\n]]></param><param name="days">'
            '3</param></function>\n<function name="now"></function>',
        ),
        (
            "hy_v3",
            "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>a</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now<tool_sep>\n</tool_call>\n"
            "</tool_calls>",
        ),
        ("functionary_v32", 'get_weather\n{"city": "a", "days": 3}>>>now\n{}'),
    ],
)
def test_required_calls_are_read_as_they_are_written(name: str, text: str) -> None:
    layout = FORMATS[name].layout
    assert layout is not None
    grammar = calls_only(layout, TOOLS, NO_SPECIAL, many=True)
    assert allows(grammar, text)
    assert not allows(grammar, text.replace("3", "three"))
    (_, calls), is_whole = read(name, [text])
    assert is_whole
    assert [name for name, _ in calls] == ["get_weather", "now"]
    assert json.loads(calls[0][1])["days"] == 3


def test_however_deep_arguments_are_they_are_read() -> None:
    depth = 5_000
    text = "<|tool_call>call:f{a:" + "[{b:" * depth + "1" + "}]" * depth + "}<tool_call|>done"
    reader = ToolCallReader(FORMATS["gemma4"].form, ["f"])
    pieces = [*reader.push(text[:7_000]).parts, *reader.push(text[7_000:], ended=True).parts]
    arguments = "".join(part.arguments for part in pieces if isinstance(part, CallPiece))
    assert arguments == '{"a": ' + '[{"b": ' * depth + "1" + "}]" * depth + "}"
    assert [part for part in pieces if isinstance(part, str)] == ["done"]
