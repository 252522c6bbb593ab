"""Values of arguments that a format writes without JSON: the tool's schema says which kind they are of."""

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any

from space_router.text.schema_walk import parts_of
from space_router.text.tool_calls import CallCollector, Cursor, Reading, content_until, whole_characters

_TYPES: Mapping[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}


def kinds_of(schema: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """Return the JSON types that a parameter may have; none if the schema does not say."""
    properties = (schema or {}).get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return _kinds(found) if isinstance(found, Mapping) else frozenset()


def _kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset({kinds})
    if isinstance(kinds, list):
        return frozenset(kind for kind in kinds if isinstance(kind, str))
    for name in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(name), list):
            return frozenset().union(*(_kinds(part) for part in parts if isinstance(part, Mapping)))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        return frozenset({"string"})
    return frozenset()


def gathered(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the types, properties and items that a schema names, with those of its references and alternatives."""
    found: dict[str, Any] = {"properties": {}, "type": []}
    for part in parts_of(root, schema, ("anyOf", "oneOf", "allOf")):
        found["type"] += sorted(_kinds({key: one for key, one in part.items() if key not in ("anyOf", "oneOf")}))
        if isinstance(properties := part.get("properties"), Mapping):
            found["properties"] = {**properties, **found["properties"]}
        for key in ("items", "additionalProperties"):
            if key in part:
                found.setdefault(key, part[key])
    return found


def as_json(text: str, kinds: frozenset[str]) -> str:
    """Return a written value as JSON: unchanged if it is JSON of an allowed type, else as a string."""
    words = text.strip()
    value = _parsed(words)
    if value is not None:
        allowed = tuple(one for kind in kinds for one in _TYPES.get(kind, ()))
        if not kinds or (type(value[0]) in allowed and isinstance(value[0], allowed)):
            return value[1]
    return json.dumps(whole_characters(text), ensure_ascii=False)


def _parsed(words: str) -> tuple[Any, str] | None:
    """Return the value and its JSON, in which no object repeats a key; None if the words are neither JSON nor a Python
    literal."""
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        repeated.extend(found if len(found) < len(pairs) else ())
        return found

    try:
        value = json.loads(words, parse_constant=_no_constant, object_pairs_hook=unique)
        return value, json.dumps(value, ensure_ascii=False) if repeated else words
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(words)
        return value, json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def value_until(
    cursor: Cursor, output: CallCollector, kinds: frozenset[str], ends: tuple[str, ...], *, trim: bool
) -> Reading[bool]:
    """Add one value, which stands before one of `ends`, to the latest call's arguments; text while it is written.

    `trim`: a line break before and behind it is not part of it. Returns False if the text ends before the value does.
    """
    if trim:
        yield from cursor.takes("\n")
    if kinds == {"string"}:
        output.arguments('"')
        pieces = _Escaped(output.arguments, trim=trim)
        ended = yield from content_until(cursor, output, ends, give=pieces.add, all_text=False)
        if ended:
            output.arguments('"')
        return ended
    written: list[str] = []
    ended = yield from content_until(cursor, output, ends, give=written.append)
    if ended:
        text = "".join(written)
        output.arguments(as_json(text.removesuffix("\n") if trim else text, kinds))
    return ended


class _Escaped:
    """Passes on text as the inside of a JSON string. `trim`: without a line break at its end."""

    def __init__(self, give: Callable[[str], None], *, trim: bool) -> None:
        self._give, self._trim = give, trim
        self._held = ""

    def add(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if self._trim and text.endswith("\n") else ""
        shown = text.removesuffix("\n") if self._held else text
        self._give(json.dumps(whole_characters(shown), ensure_ascii=False)[1:-1])
