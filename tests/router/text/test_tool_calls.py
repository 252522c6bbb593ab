"""Calls are found in a text whatever the pieces it comes in; what only looks like one is content."""

import json
import random
from typing import Any, NamedTuple

import pytest
from doubles.thinking import read_pieces
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from space_common.grammar import compile_grammar
from space_router.config import ServeConfig, settings
from space_router.text.tokenizer import SpecialTokens
from space_router.text.tool_calls import CallPiece, ToolCallLayout, ToolCallReader, calls_only, calls_or
from space_router.text.tool_parsers import formats
from space_router.text.tool_parsers.formats import named, recognised

TOOLS = frozenset({"f", "get_weather"})
FORMATS = {name: formats.FORMATS[name] for name in ("hermes", "llama3_json", "mistral", "pythonic")}


class Read(NamedTuple):
    """All that was said in a text: content, and (name, arguments) of each call."""

    content: str
    calls: list[tuple[str, str]]


def in_order(name: str, pieces: list[str]) -> list[str | int]:
    """Pieces of content as they stand among the calls, which are their indices."""
    reader = ToolCallReader(FORMATS[name].form, TOOLS)
    said = [part for piece in pieces for part in reader.push(piece).parts] + [*reader.push("", ended=True).parts]
    found: list[str | int] = []
    for part in said:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif isinstance(part, str) or part.index not in found:
            found.append(part if isinstance(part, str) else part.index)
    return found


def read(name: str, pieces: list[str]) -> Read:
    _, content, calls = read_pieces(ToolCallReader(FORMATS[name].form, TOOLS), pieces)
    return Read(content, calls)


TEXTS: list[tuple[str, str, Read]] = [
    ("hermes", "Hello, world. ", Read("Hello, world. ", [])),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', Read("", [("f", '{"a": 1}')])),
    (
        "hermes",
        'Let me see.\n\n<tool_call>{"name":"f","arguments":{"s":"}</tool_call>\\"{"}}</tool_call>\n',
        Read("Let me see.", [("f", '{"s":"}</tool_call>\\"{"}')]),
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": {"city": "Zürich 🌧"}, "name": "get_weather"}\n</tool_call>',
        Read("", [("f", "{}"), ("get_weather", '{"city": "Zürich 🌧"}')]),
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', Read("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', Read("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>', Read("", [("f", '{"a": 2}')])),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>',
        Read("", [("f", '{"a": "\ufffd"}')]),  # half a character is none
    ),
    ("pythonic", '[f(a="\\ud83d")]', Read("", [("f", '{"a": "\ufffd"}')])),
    ("pythonic", '[f(a="\\ud83d\\ude00é")]', Read("", [("f", '{"a": "😀é"}')])),
    ("hermes", 'Is <tool_call>{"name": "g"} a call?', Read('Is <tool_call>{"name": "g"} a call?', [])),
    ("hermes", "the <tool_ca", Read("the <tool_ca", [])),
    ("hermes", '<tool_call>{"name": "f", "arg', Read('<tool_call>{"name": "f", "arg', [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, {', Read("", [("f", '{"a": [1, {')])),
    ("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call>', Read("<tool_call>", [("f", "{}")])),
    ("hermes", 'a <tool_call>{"name":"f"}</tool_call> b \n', Read("a b \n", [("f", "{}")])),
    ("hermes", 'a<tool_call>{"name":"f"}</tool_call>\n\nb', Read("a\n\nb", [("f", "{}")])),
    ("hermes", '<tool_call>[{"name":"f"}]</tool_call>', Read('<tool_call>[{"name":"f"}]</tool_call>', [])),
    ("llama3_json", '{"name": "f", "parameters": {"a": "x"}}', Read("", [("f", '{"a": "x"}')])),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', Read("", [("f", "{}")])),
    (
        "llama3_json",
        '{"type": "function", "function": "f", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {}}',
        Read("", [("f", '{"a": 1}'), ("get_weather", "{}")]),
    ),
    ("llama3_json", 'Sure:\n{"name": "f", "arguments": {"a": 1}}', Read("Sure:", [("f", '{"a": 1}')])),
    ("llama3_json", 'as in {"name": "f", "parameters": {}}', Read('as in {"name": "f", "parameters": {}}', [])),
    ("llama3_json", '{"name": "Bob", "age": 7}', Read('{"name": "Bob", "age": 7}', [])),
    ("llama3_json", '{"name": "f"}', Read('{"name": "f"}', [])),
    ("llama3_json", "<|python_tag|>print(1)", Read("<|python_tag|>print(1)", [])),
    ("llama3_json", '{"name": "f", "parameters": {}}; and', Read("; and", [("f", "{}")])),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]',
        Read("", [("f", '{"a": 1}'), ("f", "{}")]),
    ),
    (
        "mistral",
        'Yes. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"b": "]"}',
        Read("Yes.", [("f", '{"a": 1}'), ("get_weather", '{"b": "]"}')]),
    ),
    ("mistral", "[TOOL_CALLS] [] then", Read("[TOOL_CALLS] [] then", [])),
    ("mistral", "[TOOL_CALLS]nobody[ARGS]{}", Read("[TOOL_CALLS]nobody[ARGS]{}", [])),
    ("pythonic", "[f(a=1, b='x)]'), get_weather()]", Read("", [("f", '{"a": 1, "b": "x)]"}'), ("get_weather", "{}")])),
    (
        "pythonic",
        '<|python_start|>[f(a=[true, None, {"x": -1.5}])]<|python_end|>',
        Read("", [("f", '{"a": [true, null, {"x": -1.5}]}')]),
    ),
    ("pythonic", "[1, 2]", Read("[1, 2]", [])),
    ("pythonic", "[f(1)]", Read("[f(1)]", [])),
    ("pythonic", "[f(a=g())]", Read("[f(a=g())]", [])),
    ("pythonic", "[f(a=1", Read("[f(a=1", [])),
    ("pythonic", "I would call [f(a=1)]", Read("I would call [f(a=1)]", [])),
]


@pytest.mark.parametrize(("name", "text", "wanted"), TEXTS)
def test_a_text_is_content_and_calls(name: str, text: str, wanted: Read) -> None:
    assert read(name, [text]) == wanted


@pytest.mark.parametrize(("name", "text", "wanted"), TEXTS)
def test_the_pieces_that_a_text_comes_in_change_nothing(name: str, text: str, wanted: Read) -> None:
    assert read(name, list(text)) == wanted
    for place in range(len(text) + 1):
        assert read(name, [text[:place], text[place:]]) == wanted
        assert in_order(name, [text[:place], text[place:]]) == in_order(name, [text])
    draw = random.Random(text)
    for _ in range(30):
        assert read(name, cut(text, draw)) == wanted


@pytest.mark.parametrize(("name", "text"), [row[:2] for row in TEXTS])
def test_wherever_a_text_ends_a_call_is_whole_that_has_all_of_its_arguments(name: str, text: str) -> None:
    for place in range(len(text) + 1):
        reader = ToolCallReader(FORMATS[name].form, TOOLS)
        reader.push(text[:place], ended=True)
        calls = read(name, [text[:place]]).calls
        assert reader.output.is_whole == (not calls or is_json(calls[-1][1])), text[:place]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def cut(text: str, draw: random.Random) -> list[str]:
    """A text in random pieces, some of them empty."""
    places = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(8)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


SCRAPS = [
    "<tool", '{"name": "f", ', '"arguments": ', '"parameters": {', "{}", "}", '"', "\\", "[ARGS]", "a=1", ")]", " ",
    "\n", ", ", "; ", "[", "]", "word", "null", '{"name": "get_weather", "arguments": {"a": "b"}}',
]  # fmt: skip
OWN = {
    "hermes": ["<tool_call>", "</tool_call>", '<tool_call>{"name": "f"', "}</tool_call>"],
    "llama3_json": ["<|python_tag|>", '\n{"name": "f", "parameters": ', '{"name": "f", "parameters": {}}'],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]f", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}'],
    "pythonic": ["<|python_start|>", "[f(", "[f(b='c'), ", "f()", "<|python_end|>"],
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_of_random_scraps_the_same_is_read_in_any_pieces_and_no_word_is_lost(name: str) -> None:
    draw = random.Random(name)
    num_called = 0
    for _ in range(600):
        scraps = draw.choices(OWN[name], k=draw.randrange(4)) + draw.choices(SCRAPS, k=draw.randrange(1, 9))
        text = draw.choice(OWN[name]) + "".join(draw.sample(scraps, len(scraps)))
        wanted = read(name, [text])
        num_called += bool(wanted.calls)
        assert read(name, cut(text, draw)) == wanted, text
        assert read(name, list(text)) == wanted, text
        assert in_order(name, cut(text, draw)) == in_order(name, [text]), text
        if not wanted.calls:
            assert wanted.content == text
        assert text.count("word") == wanted.content.count("word") + sum(call.count("word") for _, call in wanted.calls)
    assert num_called > 15


def test_arguments_come_while_they_are_written_and_are_the_models_own_text() -> None:
    reader = ToolCallReader(FORMATS["hermes"].form, TOOLS)
    assert reader.push('<tool_call>{"name": "f", ').calls == ()
    assert reader.push('"arguments": {"a"').calls == (CallPiece(0, "f", '{"a"'),)
    assert reader.push(":  1.50,").calls == (CallPiece(0, None, ":  1.50,"),)


def test_a_long_text_that_could_still_be_a_call_is_content_at_last() -> None:
    early = '<tool_call>{"arguments": {"a": "' + "x" * 20_000
    assert read("hermes", [early]) == Read(early, [])
    reader = ToolCallReader(FORMATS["hermes"].form, TOOLS)
    assert reader.push(early[:1000]).content == ""
    assert reader.push(early[1000:]).content == early


def test_a_hundred_thousand_characters_are_read_in_no_time_to_speak_of() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 100_000 + '"}}</tool_call>'
    pieces = [text[start : start + 4] for start in range(0, len(text), 4)]
    assert len(read("hermes", pieces).calls[0][1]) == 100_000 + len('{"a": ""}')
    assert len(json.loads(read("hermes", pieces).calls[0][1])["a"]) == 100_000


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("write <tool_call>{...}</tool_call>", "hermes"),
        ("{{ '[TOOL_CALLS] ' + calls | tojson }}", "mistral"),
        ('respond with {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("<|python_tag|>", "llama3_json"),
        ("in the format [func_name(param=value)]", "pythonic"),
        ("<tool_call><function=f><parameter=a>", "qwen3_coder"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
    ],
)
def test_the_format_is_recognised_by_the_templates_own_words(template: str, name: str | None) -> None:
    known = recognised(template)
    assert (None if known is None else known.name) == name


def test_every_format_can_be_asked_for_by_its_name() -> None:
    field, flag = settings()["tool_call_parser"]
    assert field.default == ServeConfig().tool_call_parser == "auto"
    assert [flag.parse(name) for name in formats.FORMATS] == list(formats.FORMATS)
    with pytest.raises(ValueError, match=", ".join(["auto", "off", *formats.FORMATS])):
        flag.parse("nonsense")


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {"get_weather": CITY, "f": {"type": "object"}}
LAYOUTS = {
    **{name: form.layout for name, form in FORMATS.items() if form.layout is not None and form.layout.notation is None},
    "mistral [ARGS]": named("mistral", "[TOOL_CALLS] [ARGS]").layout,
}
SPECIAL_ID, EOS_ID = 256, 257


class Bytes:
    """A vocabulary of single bytes, one special token and EOS."""

    bos_token_id = None
    eos_token_id = EOS_ID
    special_token_ids = (SPECIAL_ID, EOS_ID)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<special>", b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def allows(grammar: str, *pieces: str | int) -> bool:
    """Whether all of a text is allowed, and may end there; numbers are special ids."""
    matcher: LLMatcher = compile_grammar(TOKENIZER, "lark", grammar)
    ids = [id_ for piece in pieces for id_ in (list(piece.encode()) if isinstance(piece, str) else [piece])]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


NO_SPECIAL = SpecialTokens({})


def written(layout: ToolCallLayout, *calls: tuple[str, str]) -> str:
    """Calls as the layout writes them."""
    bodies = [
        layout.before_name + name + layout.before_arguments + arguments + layout.behind_arguments
        for name, arguments in calls
    ]
    return layout.trigger + layout.opening + layout.between.join(bodies) + layout.closing


ONE = ("get_weather", '{"city": "Zürich, \\"x\\"", "days": 3}')
TWO = ("f", '{"a": [1, {"b": null}]}')


@pytest.mark.parametrize("name", LAYOUTS)
def test_calls_and_only_calls_are_allowed_where_one_must_be_made(name: str) -> None:
    layout = LAYOUTS[name]
    many = calls_only(layout, SCHEMAS, NO_SPECIAL, many=True)
    single = calls_only(layout, SCHEMAS, NO_SPECIAL, many=False)
    assert allows(many, written(layout, ONE))
    assert allows(many, written(layout, ONE, TWO, ONE))
    assert allows(single, written(layout, TWO))
    for text in (
        "",
        "Sure: ",
        "Sure: " + written(layout, ONE),
        written(layout, ONE) + " and",
        written(layout, ("nobody", "{}")),
        written(layout, ("get_weather", '{"days": 3}')),
        written(layout, ("get_weather", '{"city": 3}')),
        written(layout, ("get_weather", '{"city": "x", "more": 1}')),
        written(layout, ONE)[:-1],
    ):
        assert not allows(many, text), text
    assert not allows(single, written(layout, ONE, TWO))
    assert allows(single, written(layout, TWO))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_reader_finds_the_calls_that_the_grammar_allows(name: str) -> None:
    reader = ToolCallReader(FORMATS[name.split()[0]].form, frozenset(SCHEMAS))
    said = reader.push(written(LAYOUTS[name], ONE, TWO), ended=True)
    assert said.content == ""
    assert [(call.name, call.arguments) for call in said.calls] == [ONE, TWO]


@pytest.mark.parametrize("name", LAYOUTS)
def test_beside_calls_any_text_is_allowed_that_is_none(name: str) -> None:
    layout = LAYOUTS[name]
    grammar = calls_or(None, layout, SCHEMAS, NO_SPECIAL, many=False)
    for text in ("", "No.", '{"a": 1}\n{b\n', "<tool_call", "x" * 500, "[TOOL", "Ünïcödé\n\n"):
        assert allows(grammar, text), text
    assert allows(grammar, written(layout, ONE))
    assert not allows(grammar, written(layout, ("get_weather", "{}")))
    assert not allows(grammar, written(layout, ONE, TWO))
    if layout.trigger:
        assert allows(grammar, "Let me see.\n" + written(layout, ONE))
        assert not allows(grammar, "Let me see.\n" + written(layout, ("get_weather", "{}")))
    else:
        assert not allows(grammar, 'Let me see.\n {\n"name": "get_weather", "parameters": {}}')


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.trigger])
def test_an_answer_without_a_call_can_have_a_schema_of_its_own(name: str) -> None:
    layout = LAYOUTS[name]
    grammar = calls_or({"type": "object", "required": ["x"]}, layout, SCHEMAS, NO_SPECIAL, many=True)
    assert allows(grammar, '{"x": 1}')
    assert allows(grammar, written(layout, ONE, TWO))
    assert not allows(grammar, "{}")
    assert not allows(grammar, "Sure")


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.trigger])
def test_a_marker_that_is_a_special_token_is_asked_for_by_its_id(name: str) -> None:
    layout = LAYOUTS[name]
    behind = written(layout, ONE).removeprefix(layout.trigger)
    special = SpecialTokens({layout.trigger: SPECIAL_ID})
    only = calls_only(layout, SCHEMAS, special, many=False)
    assert allows(only, SPECIAL_ID, behind)
    assert not allows(only, written(layout, ONE))
    beside = calls_or(None, layout, SCHEMAS, special, many=False)
    assert allows(beside, "Let me see.", SPECIAL_ID, behind)
    assert allows(beside, SPECIAL_ID, behind)
    assert allows(beside, "No.")
    assert not allows(beside, SPECIAL_ID, written(layout, ("get_weather", "{}")).removeprefix(layout.trigger))
    assert not allows(beside, written(layout, ("get_weather", "{}")))  # in letters it would be read as a call, too
    assert not allows(beside, "No.", SPECIAL_ID)


@pytest.mark.parametrize(("name", "token"), [("minicpm5", "<function"), ("functionary_v31", "<function")])
def test_a_token_that_begins_a_marker_is_asked_for_by_its_id(name: str, token: str) -> None:
    layout = formats.FORMATS[name].layout
    assert layout is not None
    head = layout.trigger + layout.opening + layout.before_name
    arguments = "{}" if layout.parameter is None else ""
    call = f"{head}f{layout.before_arguments}{arguments}{layout.behind_arguments}{layout.closing}"
    behind = call.removeprefix(token)
    schemas, special = {"f": {"type": "object", "properties": {}}}, SpecialTokens({token: SPECIAL_ID})
    for grammar in (
        calls_only(layout, schemas, special, many=False),
        calls_or(None, layout, schemas, special, many=False),
    ):
        assert allows(grammar, SPECIAL_ID, behind)
        assert not allows(grammar, call)


def test_arguments_are_written_with_one_space_as_models_write_json() -> None:
    layout = LAYOUTS["hermes"]
    grammar = calls_only(layout, SCHEMAS, NO_SPECIAL, many=False)
    assert not allows(grammar, written(layout, ("get_weather", '{"city":"x"}')))
    assert not allows(grammar, written(layout, ("get_weather", '{ "city": "x"}')))
    assert json.loads(ONE[1])
