"""Patterns in JSON schemas: the grammar takes them as JavaScript does, or leaves them open."""

import json
from typing import Any

import pytest
from space_common.grammar import _bytes_and, compile_grammar
from space_router.api.javascript_patterns import of_javascript
from space_router.api.json_schema import enforceable


def accepts(schema: dict[str, Any], value: Any) -> bool:
    kept = enforceable(schema, "response_format", strict=True)
    matcher = compile_grammar(_bytes_and(frozenset()), "json_schema", json.dumps(kept))
    written = json.dumps(value, ensure_ascii=False).encode()
    return all(matcher.consume_token(byte) for byte in written) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("^.$", ["a", "é", "\t"], ["\n", "\r", "\u2028", "ab"]),
        ("^[^]$", ["a", "\n"], ["", "ab"]),
        ("^[[:alpha:]]$", ["a]", ":]"], ["a", "b"]),
        ("^[[a]$", ["[", "a"], ["b"]),
        ("^[^[]$", ["a"], ["["]),
        ("^[a&&b]$", ["a", "&", "b"], ["c"]),
        ("^[+--]$", ["+", ",", "-"], ["."]),
        ("^[--/]$", ["-", ".", "/"], [","]),
        ("^[~~]$", ["~"], ["a"]),
        (r"^\[.\]$", ["[a]"], ["[", "a"]),
        (r"^[\].]\.$", ["].", ".."], ["a.", "]a"]),
        (r"^\s[\s]$", [" \ufeff", "\u2028\t"], ["\u0085 ", " \u0085"]),
        (r"^\S[a\S]$", ["\u0085a", "xy"], ["\ufeffa", "a "]),
        (r"^a{}{,2}{x$", ["a{}{,2}{x"], ["a"]),
        (r"^\<\a\cJ\0\x41\u{1F600}\uD83D\uDE00$", ["<a\n\0A\U0001f600\U0001f600"], ["<a"]),
        (r"^[\w-.][a-\d]$", ["--", ".a", "x1"], ["b"]),
        ("^[]?x$", ["x"], ["]x"]),
        (r"^[\b]$", ["\b"], ["b"]),
        (r"^\p{Letter}\p{Script=Greek}\p{sc=Grek}$", ["éαβ", "ααα"], ["1αβ", "éab"]),
        (r"^\p{Lu}\p{gc=Ll}\P{General_Category=Uppercase_Letter}$", ["Éé1"], ["éÉ1", "ÉéA"]),
        (r"^[\p{Nd}_][^\p{White_Space}]\p{scx=Hira}$", ["٣xあ", "_1ー"], ["x1あ", "3 あ"]),
    ],
)
def test_patterns_are_javascript_s(pattern: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not accepts({"type": "string", "pattern": pattern}, text)] == []
    assert [text for text in wrong if accepts({"type": "string", "pattern": pattern}, text)] == []


def test_a_pattern_that_means_the_same_in_both_languages_is_left_alone() -> None:
    for pattern in ("^[a-z]+$", r"^\d{3}-\w+\.\n*$", "", r"a\\b", "(?:x|y)*"):
        assert of_javascript(pattern) == pattern


@pytest.mark.parametrize(
    ("pattern", "is_open"),
    [
        ("x^a", True), ("a$b", True), ("x^a|b", True), ("a:^b", True),
        ("^a$", False), ("^(a|^b)$", False), ("(^a|b$)", False),
        (r"\^a", False), (r"a\$b", False), ("[^a]", False), ("a[$]b", False), ("(?:^a)", False), ("(?<n>^a)", False),
        ("", False), ("$", False), ("^", False), ("[]^]", True), (r"[\]$]x", False),
        ("^(?:^a)?b", True), ("(a$)?", True), ("(a$|b)c", True), ("a(^b|c)", True), ("(a(b$|c)|d)", False),
        ("^(?1)$", True), ("(", True), (")", True), ("a[", True), (r"\uD83D", True), ("\\", True),
        ("(?=a)", True), (r"\bword", True), (r"(a)\1", True), (r"(?<n>a)\k<n>", True),
        ("(?i)a", True), ("(?i:a)", True), ("(?s:.)", True), ("(?-u)a", True), (r"\p{letter}", True), (r"\pL", True),
        (r"\p{Greek}", True), (r"\p{Script=greek}", True), (r"\p{Cs}", True), (r"\p{age=6.0}", True),
        (r"\p{RGI_Emoji}", True), (r"[\p{sc=Zzzz}]", True), (r"\p{^L}", True), (r"\p{SC=Grek}", True),
    ],
)  # fmt: skip
def test_patterns_that_the_library_cannot_take_are_left_open(pattern: str, is_open: bool) -> None:
    assert (of_javascript(pattern) is None) == is_open
    if is_open:
        for schema in ({"pattern": pattern}, {"patternProperties": {pattern: {"type": "null"}}}):
            assert enforceable(schema, "response_format", strict=False) == {}
    else:
        accepts({"type": "string", "pattern": pattern}, "")


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("^.$", "\t", "\r"), ("^[[a]$", "[", "b"), (r"^\s$", "\ufeff", "\u0085"), ("^a{,1}$", "a{,1}", "a"),
    ],
)  # fmt: skip
def test_names_of_properties_match_javascript_s_patterns(pattern: str, right: str, wrong: str) -> None:
    schema = {"type": "object", "patternProperties": {pattern: {"const": 1}}, "additionalProperties": False}
    assert accepts(schema, {right: 1})
    assert not accepts(schema, {wrong: 1})
    listed = {"properties": {right: {"const": 2}}, **schema}
    assert "patternProperties" not in enforceable(listed, "response_format", strict=False)
    assert "patternProperties" in enforceable(schema | {"properties": {wrong: {}}}, "response_format", strict=False)
