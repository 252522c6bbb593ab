"""What a grammar of calls allows is what the reader of the same format finds, and nothing else is allowed."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from space_common.grammar import compile_grammar
from space_router.text.tool_calls.format import FORMATS, ToolCallLayout, calls_only, calls_or, named
from space_router.text.tool_calls.parser import ToolCallReader

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: dict[str, dict[str, Any]] = {"get_weather": CITY, "f": {"type": "object"}}
LAYOUTS = {
    **{name: form.layout for name, form in FORMATS.items() if form.layout is not None},
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


def no_special(text: str) -> int | None:
    return None


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
    many = calls_only(layout, TOOLS, no_special, many=True)
    single = calls_only(layout, TOOLS, no_special, many=False)
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
    reader = ToolCallReader(FORMATS[name.split()[0]].form, frozenset(TOOLS))
    said = reader.push(written(LAYOUTS[name], ONE, TWO), ended=True)
    assert said.content == ""
    assert [(call.name, call.arguments) for call in said.calls] == [ONE, TWO]


@pytest.mark.parametrize("name", LAYOUTS)
def test_beside_calls_any_text_is_allowed_that_is_none(name: str) -> None:
    layout = LAYOUTS[name]
    grammar = calls_or(None, layout, TOOLS, no_special, many=False)
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
    grammar = calls_or({"type": "object", "required": ["x"]}, layout, TOOLS, no_special, many=True)
    assert allows(grammar, '{"x": 1}')
    assert allows(grammar, written(layout, ONE, TWO))
    assert not allows(grammar, "{}")
    assert not allows(grammar, "Sure")


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.trigger])
def test_a_marker_that_is_a_special_token_is_asked_for_by_its_id(name: str) -> None:
    layout = LAYOUTS[name]
    behind = written(layout, ONE).removeprefix(layout.trigger)

    def special(text: str) -> int | None:
        return SPECIAL_ID if text == layout.trigger else None

    only = calls_only(layout, TOOLS, special, many=False)
    assert allows(only, SPECIAL_ID, behind)
    assert not allows(only, written(layout, ONE))
    beside = calls_or(None, layout, TOOLS, special, many=False)
    assert allows(beside, "Let me see.", SPECIAL_ID, behind)
    assert allows(beside, SPECIAL_ID, behind)
    assert allows(beside, "No.")
    assert not allows(beside, SPECIAL_ID, written(layout, ("get_weather", "{}")).removeprefix(layout.trigger))
    assert not allows(beside, written(layout, ("get_weather", "{}")))  # in letters it would be read as a call, too
    assert not allows(beside, "No.", SPECIAL_ID)


def test_arguments_are_written_with_one_space_as_models_write_json() -> None:
    layout = LAYOUTS["hermes"]
    grammar = calls_only(layout, TOOLS, no_special, many=False)
    assert not allows(grammar, written(layout, ("get_weather", '{"city":"x"}')))
    assert not allows(grammar, written(layout, ("get_weather", '{ "city": "x"}')))
    assert json.loads(ONE[1])
