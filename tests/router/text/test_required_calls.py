"""Required calls in other notations than JSON.

Random texts under the grammar are calls that obey the tools' schemas, and each family's own writing is allowed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import jsonschema_rs
import pytest
from doubles.thinking import read_pieces
from doubles.tool_call_writers import WRITERS, minimax_m3
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from space_common.grammar import compile_grammar
from space_router.text.tokenizer import SpecialTokens
from space_router.text.tool_calls import ToolCallLayout, ToolCallReader, calls_only, calls_or
from space_router.text.tool_parsers.formats import FORMATS, ToolFormat, named, recognised

ROLE = recognised("{'role': 'function call', 'content': x}")
assert ROLE is not None
KINDS: dict[str, ToolFormat] = {
    **{name: FORMATS[name] for name in ("pythonic", "lfm2", "olmo3", "xlam", "gemma4", "functiongemma", "minimax_m3")},
    "kimi_k3": FORMATS["kimi_k3"],
    "pythonic between markers": named("pythonic", "<|python_start|>"),
    "gigachat3 role": ROLE,
}
TOOLS: dict[str, dict[str, Any]] = {
    "book": {
        "type": "object",
        "properties": {
            "from": {"type": "string"},
            "to": {"$ref": "#/$defs/place"},
            "class": {"enum": ["economy", "first", 3, None, True]},
            "num-bags": {"type": "integer", "minimum": 0, "maximum": 9},
            "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 3},
            "price": {"type": ["number", "null"]},
            "is_return": {"type": "boolean"},
        },
        "required": ["to", "tags"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "inside": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
                },
                "required": ["inside"],
            }
        },
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "note": {
        "type": "object",
        "properties": {
            "lines": {"type": "array", "items": {"allOf": [{"type": "object"}, {"properties": {"n": {"const": 1}}}]}},
            "level": {"type": "integer"},
        },
        "required": ["level", "lines"],
    },
}
VALIDATORS = {name: jsonschema_rs.validator_for(schema) for name, schema in TOOLS.items()}
NUM_FREE, NUM_MOST, NUM_TEXTS = 60, 4000, 16
ENDING = {*b'"}])>/\n'}
LIKELY = {*b"abcnotw 1,:="}


class Marked:
    """A vocabulary of single bytes, a format's markers as special tokens, and EOS."""

    bos_token_id = None

    def __init__(self, markers: Sequence[str]) -> None:
        self.markers = list(markers)
        self.eos_token_id = 256 + len(self.markers)
        self.special_token_ids = tuple(range(256, self.eos_token_id + 1))
        self.tokens = (*(bytes([byte]) for byte in range(256)), *(b"<s%d>" % n for n in range(len(markers))), b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())

    @property
    def special(self) -> SpecialTokens:
        return SpecialTokens({text: id_ for id_, text in enumerate(self.markers, 256)})

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text. Markers in it become special tokens."""
        place, found = 0, []
        while place < len(text):
            marker = next((one for one in self.markers if text.startswith(one, place)), None)
            found += [256 + self.markers.index(marker)] if marker else [*text[place].encode()]
            place += len(marker or text[place])
        return found

    def text(self, ids: Iterable[int]) -> str:
        return b"".join(bytes([id_]) if id_ < 256 else self.markers[id_ - 256].encode() for id_ in ids).decode()


def layout_of(known: ToolFormat) -> ToolCallLayout:
    assert known.layout is not None
    return known.layout


def vocabulary(known: ToolFormat, *, special: bool) -> Marked:
    return Marked(known.markers if special else ())


def matcher(words: Marked, grammar: str) -> LLMatcher:
    return compile_grammar(LLTokenizer(TokenizerWrapper(words)), "lark", grammar)


def allows(words: Marked, grammar: str, text: str) -> bool:
    state = matcher(words, grammar)
    ids = words.ids(text)
    return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


def random_text(words: Marked, start: LLMatcher, seed: int) -> str:
    """Return a text that the grammar allows."""
    chance, state, found = random.Random(seed), start.deep_copy(), []
    while len(found) < NUM_MOST:
        mask = state.compute_bitmask()
        ids = [id_ for id_ in range(len(words.tokens)) if mask[id_ >> 3] >> (id_ & 7) & 1]
        assert ids, words.text(found)
        if words.eos_token_id in ids and (len(found) > NUM_FREE or len(ids) == 1):
            break
        ids = [id_ for id_ in ids if id_ != words.eos_token_id and (id_ < 128 or id_ >= 256)]
        ending = [id_ for id_ in ids if id_ in ENDING or id_ >= 256 or (not words.markers and id_ == ord("<"))]
        likely = [id_ for id_ in ids if id_ in LIKELY or id_ >= 256]
        if len(found) > NUM_FREE and ending and chance.random() < 0.9:
            ids = ending
        elif likely and chance.random() < 0.8:
            ids = likely
        found.append(chance.choice(ids))
        assert state.consume_token(found[-1])
    else:
        pytest.fail("the text has no end")
    return words.text(found)


@pytest.mark.parametrize(
    ("name", "special"),
    [(name, True) for name in KINDS] + [(name, False) for name in ("pythonic", "lfm2", "olmo3", "xlam")],
)
def test_whatever_a_model_writes_is_calls_that_obey_the_schemas(name: str, special: bool) -> None:
    known = KINDS[name]
    words = vocabulary(known, special=special)
    start = matcher(words, calls_only(layout_of(known), TOOLS, words.special, many=True))
    seen: set[str] = set()
    for seed in range(NUM_TEXTS):
        text = random_text(words, start, seed)
        _, content, calls = read_pieces(ToolCallReader(known.form, TOOLS), [text])
        assert (content, bool(calls)) == ("", True), text
        for tool, arguments in calls:
            pairs: list[Any] = []
            json.loads(arguments, object_pairs_hook=lambda found, pairs=pairs: pairs.append(found) or dict(found))
            assert all(len(dict(found)) == len(found) for found in pairs), text
            VALIDATORS[tool].validate(json.loads(arguments))
            seen.add(tool)
    assert seen == set(TOOLS)


BOOK = ("book", {"from": "Oslo", "to": {"name": "A b", "inside": None}, "class": "first", "tags": ["x", "y"]})
NOW: tuple[str, dict[str, Any]] = ("now", {})


@pytest.mark.parametrize("name", [name for name in KINDS if name in WRITERS])
def test_what_the_family_writes_is_allowed_and_nothing_else(name: str) -> None:
    known = KINDS[name]
    words = vocabulary(known, special=True)
    write, layout = WRITERS[name], layout_of(known)
    many = calls_only(layout, TOOLS, words.special, many=True)
    single = calls_only(layout, TOOLS, words.special, many=False)
    separated = layout.behind_answer + write([NOW, BOOK])
    if name in ("lfm2", "olmo3", "pythonic"):
        separated = separated.replace("'", '"')
    assert allows(words, many, separated)
    assert not allows(words, single, separated)
    assert allows(words, single, layout.behind_answer + write([NOW]))
    for wrong in (
        "", "Now: " + write([NOW]), write([NOW]) + " so", write([("nobody", {})]),
        write([("book", {"to": {"inside": None}})]).replace("'", '"'),
        write([("book", {"to": {"inside": None}, "tags": ["x"]})]).replace("'", '"'),
        write([("book", {"to": {"inside": 1}, "tags": ["x", "y"]})]).replace("'", '"'),
        write([("now", {"x": 1})]).replace("'", '"'), write([NOW])[:-1],
    ):  # fmt: skip
        assert not allows(words, many, layout.behind_answer + wrong), wrong


@pytest.mark.parametrize("name", KINDS)
def test_beside_calls_any_text_is_allowed_that_is_none(name: str) -> None:
    known = KINDS[name]
    words = vocabulary(known, special=True)
    layout = layout_of(known)
    grammar = calls_or(None, layout, TOOLS, words.special, many=False)
    start = matcher(words, calls_only(layout, {"now": TOOLS["now"]}, words.special, many=False))
    call = random_text(words, start, 0)
    for text in ("", "No.", '{"a": 1}\n', "a [1, 2] {'a': 3} <b>", "Ünïcödé\n\n", call):
        assert allows(words, grammar, text), text
    assert not allows(words, grammar, call + call)
    if layout.trigger:
        assert allows(words, grammar, "Let me see. " + call)
    else:
        assert not allows(words, grammar, call + " so")
        assert not allows(words, grammar, call.replace("now", "nobody"))


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("gemma4", '<|tool_call>call:f{a:1,b:{c:[1],c:[2,{c:3}],d:4},a:{x:2},e:5}<tool_call|>',
         {"a": 1, "b": {"c": [1], "d": 4}, "e": 5}),
        ("lfm2", '<|tool_call_start|>[f(from="a", class=1, x-y=None, from="b",)]<|tool_call_end|>',
         {"from": "b", "class": 1, "x-y": None}),
        ("minimax_m3", minimax_m3([("f", {"a": '{"b": 1, "b": {"c": 2, "c": 3}, "é": "\\n"}', "d": 4})]).replace(
            "</d>", "</d>]<]minimax[>[<a>5]<]minimax[>[</a>"), {"a": {"b": {"c": 3}, "é": "\n"}, "d": 4}),
        ("kimi_k3", "".join(
            f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
            for key, kind, value in (("a", "object", '{"b": 1, "b": 2}'), ("c", "string", "x"), ("a", "string", "y"))
        ).join(('<|open|>call tool="f" index="1"<|sep|>', "<|close|>call<|sep|>")), {"a": {"b": 2}, "c": "x"}),
    ],
)  # fmt: skip
def test_keys_are_unique_and_may_be_words_of_python(name: str, text: str, arguments: dict[str, Any]) -> None:
    for pieces in ([text], list(text)):
        _, content, calls = read_pieces(ToolCallReader(FORMATS[name].form, ["f"]), pieces)
        assert content == ""
        assert [json.loads(one) for _, one in calls] == [arguments]
        assert all(one.count('"a"') < 2 for _, one in calls)


TYPED = {
    "one": {"type": "object", "properties": {"a": {"type": ["string", "integer"]}, "b": {"$ref": "#/$defs/b"}},
            "required": ["a", "b"], "$defs": {"b": {"type": "array", "items": {"type": "integer"}, "minItems": 1}}},
    "any": {"type": "object"},
}  # fmt: skip


def test_a_value_has_the_type_that_its_tag_names() -> None:
    known = FORMATS["kimi_k3"]
    words, layout = vocabulary(known, special=True), layout_of(known)
    grammar = calls_only(layout, TYPED, words.special, many=True)

    def call(name: str, *arguments: tuple[str, str, str], index: int = 1) -> str:
        inner = "".join(
            f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
            for key, kind, value in arguments
        )
        return f'<|open|>call tool="{name}" index="{index}"<|sep|>{inner}<|close|>call<|sep|>'

    def calls(*texts: str) -> str:
        return f"<|close|>response<|sep|><|open|>tools<|sep|>{''.join(texts)}<|close|>tools<|sep|>"

    b = ("b", "array", "[1, 2]")
    for right in (
        [call("one", ("a", "string", "4 <b>\n"), b)],
        [call("one", ("a", "number", "4"), b), call("any", index=2), call("any", ("x", "null", "null"), index=12)],
        [call("any", ("x", "object", '{"y": [null]}'), ("z", "boolean", "true"), ("w", "string", ""))],
    ):
        assert allows(words, grammar, calls(*right)), right
    for wrong in (
        call("one", ("a", "number", "x"), b),
        call("one", ("a", "boolean", "true"), b),
        call("one", ("a", "string", "x"), ("b", "array", "[]")),
        call("one", ("a", "string", "x")),
        call("one", b, ("a", "string", "x")),
        call("any", ("x", "number", "true")),
        call("any", index=0),
    ):
        assert not allows(words, grammar, calls(wrong)), wrong
    assert layout.notation is not None
    assert layout.notation.left_open(TYPED["one"]) == []
    deep = {"properties": {"a": {"items": {"pattern": "a"}}, "b": {"pattern": "b"}}, "minProperties": 2}
    assert layout.notation.left_open(deep) == ["minProperties", "pattern"]
