"""Formats and patterns of texts: what a grammar makes under them is what JSON Schema means."""

import datetime
import json
import re
from typing import Any

import jsonschema_rs
import pytest
from schemas.generate import texts
from space_common.grammar import _bytes_and, compile_grammar
from space_router.api.json_schema import enforceable
from space_router.api.string_formats import _DATE, _PATTERNS


def accepts(schema: dict[str, Any], value: Any) -> bool:
    kept = enforceable(schema, "response_format", strict=True)
    matcher = compile_grammar(_bytes_and(frozenset()), "json_schema", json.dumps(kept))
    written = json.dumps(value, ensure_ascii=False).encode()
    return all(matcher.consume_token(byte) for byte in written) and matcher.is_accepting()


@pytest.mark.parametrize("name", _PATTERNS)
def test_random_texts_of_a_format_are_of_it(name: str) -> None:
    schema = {"type": "string", "format": name}
    known = jsonschema_rs.validator_for(schema, validate_formats=True)
    kept = json.dumps(enforceable(schema, "response_format", strict=True))
    made = [json.loads(text) for text in texts(kept, 60, 1) if isinstance(text, str) and text]
    assert len(made) > 50
    assert [text for text in made if not known.is_valid(text)] == []


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("email", ["a.b+c@example.co.uk", "a@b", "a" * 64 + "@b.c"],
         ["a@-b.com", "a" * 65 + "@b.c", "a@" + "b" * 64 + ".c", "a", "a@b@c"]),
        ("hostname", ["example.com", "a", "a--b.c", "a" * 63], ["a..b", "ab--c", "a-", "a" * 64, "a." * 130 + "a"]),
        ("date", ["2000-02-29", "2024-12-31"], ["1900-02-29", "2023-02-29", "2024-04-31", "0000-01-01", "2024-13-01"]),
        ("time", ["12:00:00Z", "23:59:59.123+02:00"], ["12:00:60Z", "24:00:00Z", "12:00:00"]),
        ("date-time", ["2024-02-29T23:59:59Z"], ["2023-02-29T00:00:00Z", "2024-02-29T00:00:00", "2024-02-29"]),
    ],
)  # fmt: skip
def test_the_bounds_of_a_format_hold_whatever_stands_beside_it(name: str, right: list[str], wrong: list[str]) -> None:
    for beside in ({"type": "string"}, {"type": ["string", "null"]}, {}, {"allOf": [{"minLength": 1}]}):
        schema = {"format": name, **beside}
        assert [text for text in right if not accepts(schema, text)] == []
        assert [text for text in wrong if accepts(schema, text)] == []
    assert accepts({"format": name}, 5)
    assert accepts({"type": "string", "format": name, "enum": [right[0]]}, right[0])


def test_dates_are_those_of_the_calendar() -> None:
    for year in (*range(1, 9), *range(1896, 1906), *range(1996, 2006), 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04d}-{month:02d}-{day:02d}"
                try:
                    is_day = bool(datetime.date(year, month, day))
                except ValueError:
                    is_day = False
                assert bool(re.fullmatch(_DATE, text)) == is_day, text
