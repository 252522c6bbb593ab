"""JSON schemas as clients write them: what is enforced, what is left open and named, and what is refused."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from space_common.grammar import MOST_CHARACTERS, lark
from space_common.worker.errors import CONTRADICTION, GRAMMAR, GRAMMARS_BUSY
from space_router.api import grammar_fields
from space_router.api.generation import translate
from space_router.api.grammar_fields import MOST_READ, json_schema_grammar, lark_grammar
from space_router.api.json_schema import enforceable
from space_router.engine.errors import RequestFailed
from space_router.errors import InvalidRequest
from space_router.http_server.responses import as_api_error
from space_router.http_server.warnings import MOST_WARNINGS, collect_warnings, warn, warning_headers

PROPERTY: dict[str, Any] = {"type": "string"}


def opened(schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The enforceable part, which the grammar library must take, and the keywords that the warning names."""
    with collect_warnings() as warnings:
        kept = enforceable(schema, "tools", strict=False)
    is_wrong, reasons = LLMatcher.validate_grammar_with_warnings(
        LLMatcher.grammar_from_lark(lark("json_schema", json.dumps(kept)))
    )
    assert not is_wrong, reasons
    return kept, [word for text in warnings for word in text.split("`")[3::2]]


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, ["uniqueItems"]),
        ({"type": "array", "uniqueItems": False}, []),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, ["propertyNames"]),
        ({"type": "object", "propertyNames": {"type": "string"}}, []),
        ({"type": "string", "format": "unheard"}, ["format: 'unheard'"]),
        ({"type": "string", "format": "date-time"}, []),
        ({"type": "integer", "format": "int64"}, []),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, []),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, ["oneOf"]),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf"]),
        ({"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}]}, []),
        ({"not": {"type": "string"}}, ["not"]),
        ({"if": {"type": "string"}, "then": {"minLength": 2}, "else": {}}, ["if"]),
        ({"type": "array", "contains": {"type": "integer"}, "minContains": 2}, ["contains"]),
        ({"type": "string", "pattern": "^(?!a)b"}, ["pattern"]),
        ({"type": "string", "pattern": r"\bword"}, ["pattern"]),
        ({"type": "string", "pattern": r"(a)\1"}, ["pattern"]),
        ({"type": "string", "pattern": r"^a\\b$"}, []),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, ["dependentRequired"]),
        ({"type": "object", "unevaluatedProperties": False}, ["unevaluatedProperties"]),
        ({"type": "object", "properties": None, "required": None}, []),
        ({"type": "integer", "maximum": 2**64 - 1}, ["maximum: 18446744073709551615"]),
        ({"type": "integer", "maximum": 2**53}, []),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2}, ["minProperties"]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1, "required": ["a"]}, []),
        ({"type": "object", "properties": {"a": {}}, "maxProperties": 3, "required": ["a"]}, []),
        ({"$ref": "other.json#/definitions/a"}, ["$ref: 'other.json#/definitions/a'"]),
        ({"type": "string", "$schema": "https://json-schema.org/draft-07/schema"}, []),
        ({"type": "string", "$schema": "https://example.com/own-dialect.json"}, []),
        ({"type": "object", "patternProperties": {"^a": PROPERTY, "b$": PROPERTY}}, ["patternProperties"]),
        ({"type": "object", "properties": {"ab": {"type": "integer"}}, "patternProperties": {"^a": PROPERTY}},
         ["patternProperties"]),
        ({"type": "object", "properties": {"b": PROPERTY}, "patternProperties": {"^a": PROPERTY}}, []),
        ({"type": "number", "multipleOf": 1e-30}, ["multipleOf: 1e-30"]),
        ({"type": "number", "multipleOf": 2**40}, ["multipleOf: 1099511627776"]),
        ({"type": "number", "multipleOf": 0.0001}, []),
        ({"type": "string", "enum": None, "description": None, "minLength": None}, []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("inside", [False, True])
def test_what_cannot_be_enforced_is_left_open_and_named(
    keywords: dict[str, Any], named: list[str], inside: bool
) -> None:
    schema = {"type": "object", "properties": {"x": keywords}, "required": ["x"]} if inside else keywords
    assert opened(schema)[1] == named
    if not named:
        enforceable(schema, "tools", strict=True)
        return
    with pytest.raises(InvalidRequest, match="is strict, and its schema asks for") as refused:
        enforceable(schema, "tools", strict=True)
    assert f"`{named[0]}`" in refused.value.message


def test_branches_that_a_property_tells_apart_are_exclusive() -> None:
    def branch(kind: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}

    kept, named = opened({"oneOf": [branch("a"), branch("b")]})
    assert kept == {"oneOf": [branch("a"), branch("b")]}
    assert named == []
    assert opened({"oneOf": [branch("a"), branch("a")]})[1] == ["oneOf"]


def test_what_only_branches_without_a_type_allow_is_none_of_the_exclusive_ones() -> None:
    def branch(kind: str, **more: Any) -> dict[str, Any]:
        return {"properties": {"kind": {"const": kind}}, "required": ["kind"], **more}

    kept, named = opened({"oneOf": [branch("a"), branch("b", description="B"), {"type": "string"}]})
    assert kept["oneOf"] == [
        branch("a", type="object"),
        branch("b", description="B", type="object"),
        {"type": "string"},
    ]
    assert named == ["oneOf"]  # the string has no kind
    assert opened({"oneOf": [branch("a"), branch("b")]})[1] == []
    assert opened({"oneOf": [branch("a"), branch("b", type="object")]})[1] == []  # a number is the first alone
    assert opened({"oneOf": [branch("a", minimum=3), branch("b", minimum=5)]})[1] == ["oneOf"]
    assert opened({"oneOf": [branch(k, type=["object", "null"]) for k in "ab"]})[1] == ["oneOf"]


def test_sizes_may_be_written_as_whole_floats() -> None:
    kept, named = opened({"type": "array", "minItems": 1.0, "maxItems": 2e0, "items": {"minLength": 3.0}})
    assert json.dumps(kept) == '{"type": "array", "minItems": 1, "maxItems": 2, "items": {"minLength": 3}}'
    assert named == []


@pytest.mark.parametrize("size", [2**31, 2**32, 2**53, 2**64 + 1, 1e30])
def test_sizes_beyond_any_output_are_those_of_the_longest(size: float) -> None:
    for kind, keyword in (("string", "Length"), ("array", "Items"), ("object", "Properties")):
        kept, named = opened({"type": kind, f"max{keyword}": size})
        assert kept == {"type": kind, f"max{keyword}": 2**31}
        assert named == []
    assert opened({"type": "string", "minLength": size})[0]["minLength"] == 2**31


def test_a_property_without_a_schema_may_be_anything() -> None:
    kept, named = opened({"type": "object", "properties": {"x": None, "const": {"type": "string"}}})
    assert kept["properties"] == {"x": True, "const": {"type": "string"}}
    assert named == []


def test_names_that_only_an_open_pattern_allows_stay_possible() -> None:
    kept, _ = opened({"patternProperties": {"^a": {}, "b$": {}}, "additionalProperties": False})
    assert kept == {"additionalProperties": True}


@pytest.mark.parametrize("schema", [{"const": 2**53 + 1}, {"enum": ["a", 2**64 + 1]}, {"const": {"a": [-(2**60)]}}])
@pytest.mark.parametrize("strict", [True, False])
def test_numbers_that_are_taken_for_their_neighbours_are_refused(schema: dict[str, Any], strict: bool) -> None:
    with pytest.raises(InvalidRequest, match=r"numbers beyond 2\^53 are not exact"):
        enforceable({"properties": {"x": schema}}, "response_format", strict=strict)


def test_schemas_are_enforceable_wherever_references_find_them() -> None:
    own = {"type": "array", "uniqueItems": True}
    kept, named = opened({"$ref": "#/own/deep", "own": {"deep": own}, "oneOf": [{"$ref": "#/own/deep"}]})
    assert kept["own"]["deep"] == {"type": "array"}
    assert named == ["uniqueItems"]


def test_a_model_that_contains_itself_may_have_a_default_beside_the_reference() -> None:
    child = {"$ref": "#/$defs/Node", "default": None, "title": "Child", "description": "as pydantic writes it"}
    node = {"type": "object", "properties": {"child": child}, "required": ["child"]}
    assert opened({"$ref": "#/$defs/Node", "$defs": {"Node": node}})[1] == []


def test_keywords_of_older_drafts_keep_their_meaning() -> None:
    third = "http://json-schema.org/draft-03/schema#"
    properties = {"a": {"type": "any", "required": True}, "b": {"type": ["null", {"minLength": 2}], "required": False}}
    kept, named = opened(
        {"$schema": third, "properties": properties, "extends": {"type": "object"}, "disallow": "null"}
    )
    assert kept == {
        "properties": {"a": {}, "b": {"anyOf": [{"type": "null"}, {"minLength": 2}]}},
        "allOf": [{"type": "object"}],
        "required": ["a"],
    }
    assert named == ["disallow"]
    assert opened({"$schema": third, "divisibleBy": 3})[0] == {"multipleOf": 3}
    assert opened({"divisibleBy": 3, "extends": 1}) == ({"divisibleBy": 3, "extends": 1}, [])
    anchored = {"$ref": "#named", "$defs": {"a": {"id": "#named", "type": "null"}}}
    assert opened(anchored)[0]["$defs"] == {"a": {"$anchor": "named", "type": "null"}}


def test_a_schema_that_its_descriptions_make_too_long_is_sent_without_them() -> None:
    properties = {"title": {"type": "string", "description": "x" * MOST_CHARACTERS}, "c": {"const": {"title": 1}}}
    grammar = json_schema_grammar({"type": "object", "properties": properties, "x-y": 1}, "tools")
    assert json.loads(grammar.source) == {
        "type": "object",
        "properties": {"title": {"type": "string"}, "c": {"const": {"title": 1}}},
    }
    properties["title"]["description"] = "x"
    assert "description" in json_schema_grammar({"properties": properties}, "tools").source


def test_a_schema_that_would_take_seconds_to_go_through_is_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"properties": {"a": {"enum": [f"{n:0100}" for n in range(11_000)]}}}
    described = {"properties": {"a": {"type": "null", "description": "x" * 2 * MOST_READ}}}
    assert "description" not in json_schema_grammar(described, "tools").source

    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(grammar_fields, "enforceable", never)
    for schema in (long, json.dumps(long)):
        with pytest.raises(InvalidRequest, match=f"at most {MOST_READ} are read"):
            json_schema_grammar(schema, "tools")


def test_a_schema_that_is_nested_too_deep_is_refused() -> None:
    for text in ('{"items":' * 900 + "{}" + "}" * 900, '{"enum":[' + "[" * 70 + "]" * 70 + "]}"):
        with pytest.raises(InvalidRequest, match="nested more than 64 deep"):
            json_schema_grammar(text, "tools")
        with pytest.raises(InvalidRequest, match="nested more than 64 deep"):
            lark_grammar(f"start: %json {text}", "tools")


KEYWORDS = [
    *("type", "properties", "required", "items", "enum", "const", "oneOf", "anyOf", "allOf", "not", "if"),
    *("pattern", "format", "minProperties", "patternProperties", "additionalProperties", "$ref", "$schema"),
    *(
        "$defs",
        "uniqueItems",
        "maximum",
        "prefixItems",
        "minLength",
        "default",
        "extends",
        "id",
        "items",
        "maxProperties",
    ),
]
WORDS = [*KEYWORDS, "#", "#/$defs/a", "#/items", "any"]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=4),
    st.sampled_from(WORDS),
)
HOSTILE = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*KEYWORDS, "a"]), inner, max_size=5),
    max_leaves=25,
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYWORDS), HOSTILE, max_size=6), st.booleans())
def test_what_is_no_schema_is_no_failure_of_the_server(schema: dict[str, Any], strict: bool) -> None:
    with contextlib.suppress(InvalidRequest):
        json.dumps(enforceable(schema, "tools", strict=strict))


def test_data_is_not_read_as_a_schema() -> None:
    schema = {"const": {"not": 1, "uniqueItems": True}, "default": {"oneOf": [1]}}
    assert opened(schema) == (schema, [])


def test_warnings_are_headers_of_bounded_size() -> None:
    with collect_warnings() as texts:
        for number in range(20):
            warn(f'The “{number}” is\n"open"' + "x" * 1000)
            warn(f'The “{number}” is\n"open"' + "x" * 1000)
    headers = warning_headers(texts)
    assert len(headers) == MOST_WARNINGS + 1
    assert all(name == b"warning" and text.isascii() and len(text) < 700 for name, text in headers)
    assert headers[0][1].startswith(b'299 spaceserve "The \\\\u201c0\\\\u201d is \\"open\\"xx')
    warn("outside of a request")


USER = [{"role": "user", "content": "x"}]


async def test_a_schema_beyond_the_grammar_is_answered_with_a_warning(router: Any) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for stream in (False, True):
        answer = await router.post(
            "/v1/chat/completions", messages=USER, max_tokens=2, response_format=form, stream=stream
        )
        assert answer.status_code == 200, answer.text
        assert "`uniqueItems`, which is not enforced" in answer.headers["warning"]
    plain = await router.post("/v1/chat/completions", messages=USER, max_tokens=2)
    assert "warning" not in plain.headers


MARK = {"cache_control": {"type": "ephemeral"}}
FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", **MARK}]}]}),
        ("chat/completions", {"messages": [{**USER[0], **MARK}]}),
        ("chat/completions", {"messages": USER, "tools": [{**FUNCTION, **MARK}], "tool_choice": "none"}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi", **MARK}]}]}),
    ],
)
async def test_marks_for_a_cache_are_taken_with_a_warning(router: Any, path: str, asked: dict[str, Any]) -> None:
    limit = {"max_output_tokens" if path == "responses" else "max_tokens": 2}
    answer = await router.post(f"/v1/{path}", **asked, **limit)
    assert answer.status_code == 200, answer.text
    assert "`cache_control` has no effect" in answer.headers["warning"]


def test_a_contradiction_is_the_clients_and_a_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    error = translate(RequestFailed(f"{CONTRADICTION} at position 3."))
    assert (error.status, error.code, error.headers) == (400, "contradictory_constraints", {})
    for words in ("cannot be used: lexer error", "leaves no id at position 4: its positions take too long to compute"):
        error = translate(RequestFailed(f"{GRAMMAR}{words}"))
        assert (error.status, error.code, error.headers) == (400, "invalid_grammar", {})
    busy = translate(RequestFailed(f"{GRAMMARS_BUSY} that this one had to be compiled in."))
    assert (busy.status, busy.headers["Retry-After"]) == (429, "10")
    failure = translate(RequestFailed("No id can be chosen at position 3: the logits are not finite."))
    failure.request_id = "cmpl-7"
    assert failure.status == 500
    for each in (error, failure):
        assert as_api_error(each) is each
    assert [record.getMessage() for record in caplog.records] == [
        "request cmpl-7: 500, No id can be chosen at position 3: the logits are not finite."
    ]
