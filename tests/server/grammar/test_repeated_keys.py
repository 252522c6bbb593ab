"""No object repeats a key: the ids that would are impossible, and no others, wherever objects stand."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from space_common.grammar import compile_grammar
from space_common.json_places import JsonPlaces
from space_server.grammar import GrammarState, TokenVocabulary, ids_of

EOS, CALL = 1, 2
PIECES = [
    b'{"', b'":', b'","', b'"a"', b'"a":', b'{"a":1,"a":', b'{"a":1,"b":', b',"a":', b'","a":"', b'},"a":', b'a":{"a":',
    b'"', b'a"', b'aa":1', b'\\u00', b'u0061', b'\\', b'u00', b'61"', b'"\\u0061"', b'": "', b'x1', b'x2":', b'}}',
    b'b":[{"a":1},{"a":',
    b'"],"a":', b', "', b'\n "a', b'\\n', b'0a"', b'""', b'"":', "é".encode(), "é".encode()[:1],
]  # fmt: skip
TEXTS = [b"", b"", b"", *(bytes([byte]) for byte in range(256)), *PIECES]
VOCABULARY = TokenVocabulary(TEXTS, {EOS: b"<eos>", CALL: b"<call>"})
FREE = {"type": "object"}
NESTED = {
    "type": "object",
    "properties": {"a": {"type": "object", "additionalProperties": {"type": "integer"}}, "b": {"type": "array"}},
    "required": ["a"],
    "additionalProperties": {"type": "object", "additionalProperties": {"enum": [1, "a"]}},
}
PATTERNS = {
    "type": "object",
    "patternProperties": {"^(a|b|x[12]|é)$": {"enum": [1, {}]}},
    "additionalProperties": False,
}


def state(schema: object, output: bytes = b"") -> GrammarState:
    source = json.dumps(schema)
    compiled = compile_grammar(VOCABULARY.tokenizer, "json_schema", source)
    has_patterns = "patternProperties" in source
    return GrammarState(
        VOCABULARY, compiled.deep_copy, eos_ids=[EOS], output=[3 + byte for byte in output], json_places=JsonPlaces(),
        has_patterns=has_patterns,
    )  # fmt: skip


_KEY_ESCAPE = re.compile(rb'\\(?:[^u"\\bfnrt]|u(?!$|0$|00$|00[01]$|007$|00(?:0[0-7b]|0[ef]|1[0-9a-f]|7f)))')


def repeats(text: bytes) -> bool:
    """Judge the beginning of a JSON text, from its start."""
    open_objects: list[set[str] | None] = []
    key_follows, place = False, 0
    while place < len(text):
        char = text[place : place + 1]
        place += 1
        if char in b"{[":
            open_objects.append(set() if char == b"{" else None)
            key_follows = char == b"{"
        elif char in b"}]":
            open_objects.pop()
        elif char == b",":
            key_follows = open_objects[-1] is not None
        elif char == b'"':
            begin = place
            while place < len(text) and text[place] != 0x22:
                place += 2 if text[place] == 0x5C else 1
            written = text[begin:place]
            if key_follows and _KEY_ESCAPE.search(written.replace(b"\\\\", b"")):
                return True
            keys = open_objects[-1] if open_objects else None
            if key_follows and keys is not None and place < len(text):
                name = json.loads(b'"' + written + b'"')
                if name in keys:
                    return True
                keys.add(name)
                key_follows = False
            place += 1
    return False


def allowed_by_library(schema: object, output: list[int]) -> list[int]:
    matcher = compile_grammar(VOCABULARY.tokenizer, "json_schema", json.dumps(schema)).deep_copy()
    assert matcher.consume_tokens(output) or not output
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)[: len(VOCABULARY.possible)]
    return [id_ for id_ in ids_of(bits & VOCABULARY.possible) if id_ not in (EOS, CALL)]


@pytest.mark.parametrize("schema", [FREE, NESTED], ids=["free", "nested"])
@pytest.mark.parametrize("seed", range(6))
def test_the_impossible_ids_are_those_that_repeat_a_key(schema: object, seed: int) -> None:
    chance = random.Random(seed)
    known, output, num_forbidden = state(schema), list[int](), 0
    likely = {3 + byte for byte in b'{}[]",:ab1'} | set(range(259, len(TEXTS)))
    for _ in range(60):
        possible = known.possible().ids
        assert possible is not None
        found = [id_ for id_ in ids_of(possible) if id_ != EOS]
        text = b"".join(TEXTS[id_] for id_ in output)
        library = allowed_by_library(schema, output) if found else []
        expected = [id_ for id_ in library if not repeats(text + TEXTS[id_])]
        assert found == expected, text
        num_forbidden += len(library) - len(expected)
        if not found:
            break
        id_ = chance.choice([id_ for id_ in found if id_ in likely] or found)
        for _ in range(2):  # drafts that are looked at and given up
            known.possible([chance.choice(found)])
        known.advance([id_])
        output.append(id_)
    assert num_forbidden > 0


@pytest.mark.parametrize(
    ("schema", "text", "forbidden"),
    [
        (FREE, '{"a":1,"a', '"'),
        (FREE, '{"a":{"b":1,"b', '"'),
        (FREE, '{"a":[{"a":1},{"b":1,"b', '"'),
        (FREE, '{"é":1,"é', '"'),
        (FREE, '{"\\n":1,"\\n', '"'),
        (FREE, '{"a\\"":1,"a\\"', '"'),
        (NESTED, '{"a":{"x":1,"x', '"'),
        (NESTED, '{"a":{},"c":{"a":1,"a', '"'),
        (PATTERNS, '{"a":1,"', "a"),
        (PATTERNS, '{"x1":1,"x', "1"),
        (PATTERNS, '{"x1":1,"x2":1,"', "x"),
        (PATTERNS, '{"x1":1,"x2":1,"a":1,"b":1,"é":1', ","),
        (PATTERNS, '{"x1":1,"x2":1,"a":1,"b":1,"é":{}', ","),
    ],
)
def test_a_key_comes_once(schema: object, text: str, forbidden: str) -> None:
    assert 3 + ord(forbidden) not in ids_of(state(schema, text.encode()).possible().ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ['{"a":1,"b":{"a', '{"a":[{"a', '{"a":{"b":1},"b', '{"a":"a","aa', '[{"a":1},{"a'])
def test_the_same_key_in_another_object_is_free(text: str) -> None:
    schema: object = {"type": ["object", "array"]}
    assert 3 + ord('"') in ids_of(state(schema, text.encode()).possible().ids)  # type: ignore[arg-type]


def test_a_key_cannot_be_written_in_a_second_way() -> None:
    known = state({"type": "object", "properties": {"a": {"type": "integer"}}}, b'{"')
    by_text = {text: id_ for id_, text in enumerate(TEXTS)}
    assert by_text[b"\\"] in ids_of(known.possible().ids)  # type: ignore[arg-type]
    assert by_text[b"\\u00"] in ids_of(known.possible().ids)  # type: ignore[arg-type]
    after = known.possible([by_text[b"\\u00"]]).ids
    assert after is not None
    assert [TEXTS[id_] for id_ in ids_of(after) if id_ < 259] == [b"0", b"1", b"7"]
    assert by_text[b"u0061"] not in ids_of(known.possible([by_text[b"\\"]]).ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(8))
def test_no_key_is_begun_that_could_only_be_repeated(seed: int) -> None:
    chance = random.Random(seed)
    schema = {**PATTERNS, "minProperties": 3}
    known, output = state(schema), list[int]()
    while True:
        possible = known.possible()
        assert possible.ids is not None
        assert np.any(possible.ids), known.trouble
        id_ = chance.choice(ids_of(possible.ids))
        if id_ == EOS:
            break
        known.advance([id_])
        output.append(id_)
    pairs = json.loads(b"".join(TEXTS[id_] for id_ in output), object_pairs_hook=list)
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names)) >= 3


def test_going_back_forgets_the_keys_of_the_drafts() -> None:
    known = state(FREE, b'{"a":1,"')
    quote, a, b = (3 + ord(letter) for letter in '"ab')
    behind = [b, quote, *(3 + byte for byte in b':1,"')]
    assert quote in ids_of(known.possible([*behind, a, b]).ids)  # type: ignore[arg-type]
    assert quote not in ids_of(known.possible([*behind, b]).ids)  # type: ignore[arg-type]
    assert known.possible([*behind, b, quote]).ids is None, "nothing comes behind it"
    assert quote in ids_of(known.possible([b]).ids)  # type: ignore[arg-type]
    assert known.num_possible([a], [quote]) == 0
    assert known.num_possible([b], [quote]) == 1
    known.advance(behind)
    assert quote not in ids_of(known.possible([b]).ids)  # type: ignore[arg-type]
