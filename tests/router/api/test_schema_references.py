"""References inside a schema: each is taken, and what stands beside it is asked for, too."""

import json
from typing import Any

import pytest
from space_common.grammar import _bytes_and, compile_grammar
from space_router.api.json_schema import enforceable
from space_router.api.schema_references import as_uri


def compiled(schema: dict[str, Any], *, strict: bool = True) -> Any:
    kept = enforceable(schema, "response_format", strict=strict)
    return compile_grammar(_bytes_and(frozenset()), "json_schema", json.dumps(kept))


def accepts(schema: dict[str, Any], value: Any) -> bool:
    matcher = compiled(schema)
    return all(matcher.consume_token(byte) for byte in json.dumps(value).encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("List<int>", "List<int>"), ("a b", "a b"), ("ü", "ü"), ("a[b]", "a[b]"), ("a%b", "a%b"), ("a%25b", "a%b"),
        ("a%3Cb", "a<b"), ('a"b', 'a"b'), ("a~1b", "a/b"), ("a|b", "a|b"),
    ],
)  # fmt: skip
def test_names_may_have_characters_that_a_uri_has_not(reference: str, name: str) -> None:
    schema = {"$ref": f"#/$defs/{reference}", "$defs": {name: {"type": "integer"}}}
    assert accepts(schema, 5)
    assert not accepts(schema, "5")
    assert as_uri(as_uri(f"#/$defs/{reference}")) == as_uri(f"#/$defs/{reference}")


TREE = {"type": "object", "properties": {"v": {"type": "integer"}}, "additionalProperties": False}


def tree(beside: dict[str, Any]) -> dict[str, Any]:
    """A recursive schema: a tree, with the keywords `beside` next to the `$ref` of its child."""
    child = {"$ref": "#/$defs/tree", **beside}
    inside = {**TREE, "properties": {**TREE["properties"], "child": child}}
    return {"$ref": "#/$defs/tree", "$defs": {"tree": inside}}


@pytest.mark.parametrize(
    "beside", [{"required": ["v"]}, {"allOf": [{"required": ["v"]}]}, {"anyOf": [{"required": ["v"]}]}]
)
def test_restrictions_beside_a_reference_hold_in_a_schema_that_contains_itself(beside: dict[str, Any]) -> None:
    schema = tree(beside)
    before = json.dumps(schema)
    assert accepts(schema, {"child": {"v": 1, "child": {"v": 2}}})
    assert not accepts(schema, {"child": {"v": 1, "child": {}}})
    assert not accepts(schema, {"child": {"w": 1}})
    assert accepts(schema, {})
    assert json.dumps(schema) == before


def test_what_a_schema_is_put_together_from_may_contain_it_or_be_one_of_several() -> None:
    node = {"allOf": [{"$ref": "#"}, {"required": ["v"]}]}
    schema: dict[str, Any] = {**TREE, "properties": {"v": {"type": "integer"}, "child": node}}
    assert accepts(schema, {"child": {"v": 1}})
    assert not accepts(schema, {"child": {}})
    option = {"anyOf": [{"$ref": "#"}, {"type": "null"}], "type": ["object", "null"]}
    schema["properties"] = {"v": {"type": "integer"}, "child": option}
    assert accepts(schema, {"child": None})
    assert accepts(schema, {"child": {"v": 1, "child": None}})
    assert not accepts(schema, {"child": {"v": "1"}})


def test_annotations_of_every_kind_may_stand_beside_a_reference() -> None:
    assert accepts(tree({"x-order": 1, "markdownDescription": "a", "readOnly": True}), {"child": {}})


def test_references_that_end_nowhere_do_not_stop_the_server() -> None:
    for definition in ({"$ref": "#/$defs/a", "type": "object"}, {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/x"}]}):
        enforceable({"$ref": "#/$defs/a", "$defs": {"a": definition}}, "tools", strict=False)


def test_a_reference_to_what_is_left_open_is_left_open() -> None:
    rule = {"if": {"type": "string"}, "then": {"minLength": 1}}
    schema = {"items": {"$ref": "#/$defs/a/then"}, "$defs": {"a": rule}}
    assert "$ref" not in enforceable(schema, "tools", strict=False)["items"]
    compiled(schema, strict=False)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "minProperties": 1},
        {"allOf": [{"$ref": "#/$defs/a"}, {"maxProperties": 1}]},
        {"minProperties": 1, "anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]},
    ],
)
def test_sizes_are_left_open_where_another_part_has_optional_properties(schema: dict[str, Any]) -> None:
    schema["$defs"] = {"a": {"type": "object", "properties": {"x": {}, "y": {}}}}
    assert "Properties" not in json.dumps(enforceable(schema, "tools", strict=False))
    compiled(schema, strict=False)
    schema["$defs"]["a"]["required"] = ["x", "y"]
    assert "Properties" in json.dumps(enforceable(schema, "tools", strict=True))
