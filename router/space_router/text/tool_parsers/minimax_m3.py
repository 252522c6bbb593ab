"""MiniMax-M3: each tag behind a name space token, values of objects and lists as tags in tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from space_router.text.tool_calls import CallCollector, Cursor, Reading, Tools, content_until, no_call
from space_router.text.tool_parsers.values import as_json, gathered, kinds_of

SPACE_NAME = "]<]minimax[>["
OPENING, CLOSING = f"{SPACE_NAME}<tool_call>", f"{SPACE_NAME}</tool_call>"
INVOKE, INVOKE_END = f'{SPACE_NAME}<invoke name="', f"{SPACE_NAME}</invoke>"
TAG, TAG_END = f"{SPACE_NAME}<", f"{SPACE_NAME}</"
_ITEM = "item"
_MOST_DEPTH = 64

Schema = Mapping[str, Any]


def minimax_m3(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """Any number of calls in a block. Each value is reported when it is complete."""
    while (yield from content_until(cursor, output, (OPENING,))):
        cursor.keep()
        cursor.at += len(OPENING)
        num_before = output.num_calls
        while (yield from _call(cursor, output, tools)):
            cursor.keep()
        if output.num_calls == num_before:
            no_call(cursor, output, OPENING)
            continue
        if not output.is_whole:
            return
        cursor.back()
        yield from cursor.skip()
        yield from cursor.takes(CLOSING)


def _call(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[bool]:
    yield from cursor.skip()
    if not (yield from cursor.takes(INVOKE)):
        return False
    name = yield from cursor.run(lambda char: char not in '"<\n', 128)
    if name not in tools or not (yield from cursor.takes('">')):
        return False
    cursor.let_go()
    output.call(name)
    output.arguments("{")
    separator, keys = "", set[str | None]()
    while True:
        yield from cursor.skip()
        if (yield from cursor.takes(INVOKE_END)):
            output.arguments("}")
            output.is_whole = True
            return True
        if not (yield from cursor.takes(TAG)):
            return False
        key = yield from _tag_name(cursor)
        root = tools[name]
        written = None if key is None else (yield from _value(cursor, root, _property(root, key), key, 0))
        if written is None:
            return False
        if key in keys:
            continue  # the first value is taken
        keys.add(key)
        output.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {written}")
        separator = ", "


def _tag_name(cursor: Cursor) -> Reading[str | None]:
    name = yield from cursor.run(lambda char: char not in "<>\n", 256)
    return name if (yield from cursor.takes(">")) else None


def _property(schema: Schema, key: str) -> Schema:
    """Return what an object's schema says of a property: as a schema with only that one."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    if found is None:
        found = schema.get("additionalProperties")
    return found if isinstance(found, Mapping) else {}


def _value(cursor: Cursor, root: Schema, schema: Schema, tag: str, depth: int) -> Reading[str | None]:
    """Return the JSON of what stands in a tag, and read its end; None if the text ends before, or is malformed.
    `root`: what the references of `schema` start from."""
    schema = gathered(schema, root)
    parts: list[str] = []
    if not (yield from content_until(cursor, CallCollector(), (SPACE_NAME,), give=parts.append, all_text=False)):
        return None
    text = "".join(parts)
    inner: list[tuple[str, str]] = []
    while not (yield from cursor.takes(f"{TAG_END}{tag}>")):
        if depth == _MOST_DEPTH or not (yield from cursor.takes(TAG)):
            return None
        name = yield from _tag_name(cursor)
        if name is None:
            return None
        items = schema.get("items")
        below = items if name == _ITEM and isinstance(items, Mapping) else _property(schema, name)
        written = yield from _value(cursor, root, below, name, depth + 1)
        if written is None:
            return None
        inner.append((name, written))
        yield from cursor.skip()
    kinds = kinds_of({"properties": {tag: schema}}, tag)
    if not inner:
        if not text.strip() and kinds and not kinds - {"array", "object", "null"}:
            return "[]" if "array" in kinds else "{}" if "object" in kinds else "null"
        return as_json(text, kinds)
    if all(name == _ITEM for name, _ in inner) and ("array" in kinds or "object" not in kinds):
        return f"[{', '.join(written for _, written in inner)}]"
    grouped: dict[str, list[str]] = {}
    for name, written in inner:
        grouped.setdefault(name, []).append(written)
    pairs = []
    for name, found in grouped.items():
        whole = found[0] if len(found) == 1 else f"[{', '.join(found)}]"
        pairs.append(f"{json.dumps(name, ensure_ascii=False)}: {whole}")
    return f"{{{', '.join(pairs)}}}"
