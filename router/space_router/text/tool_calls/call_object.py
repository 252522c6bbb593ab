"""Parse a call that is a JSON object: `{"name": "f", "arguments": {...}}`, keys in any order."""

import json
from collections.abc import Callable

from space_router.text.tool_calls.parser import Cursor, Reading, Telling

NAME_KEYS = frozenset({"name", "function"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
OTHER_KEYS = frozenset({"type", "id"})

MAX_UNCERTAIN = 16 * 1024
"""A candidate that is still not known to be a call after this many characters is content."""


def call_object(cursor: Cursor, telling: Telling, tools: frozenset[str], *, needs_arguments: bool) -> Reading[bool]:
    """Parse one call and report its arguments as they arrive. Returns False, reporting nothing, if it is not a call.

    The caller marks the start with `cursor.keep`; the mark is dropped once the object is known to be a call.
    """
    limit = cursor.at + MAX_UNCERTAIN
    name: str | None = None
    early: str | None = None  # arguments that precede the name
    told = False

    def tell(arguments: str) -> None:
        """Report a call. Empty `arguments`: they follow."""
        nonlocal told
        if name is not None:
            telling.call(name)
            cursor.let_go()
            told = True
            telling.arguments(arguments)
            if arguments:
                telling.whole()

    if not (yield from cursor.takes("{")):
        return False
    while True:
        yield from cursor.skip()
        key = yield from _string(cursor, None if told else limit)
        yield from cursor.skip()
        if not (yield from cursor.takes(":")):
            return told
        yield from cursor.skip()
        if key in NAME_KEYS and name is None:
            name = yield from _string(cursor, limit)
            if name not in tools:
                return False
            if early is not None:
                tell(early)
        elif key in ARGUMENT_KEYS and not told and early is None:
            if name is not None and (yield from cursor.peek()) == "{":
                tell("")
                if not (yield from brackets(cursor, telling.arguments)):
                    return True
                telling.whole()
            else:
                early = yield from _arguments(cursor, limit)
                if early is None:
                    return False
                if name is not None:
                    tell(early)
        elif key not in OTHER_KEYS or (yield from _string(cursor, None if told else limit)) is None:
            return told
        yield from cursor.skip()
        if (yield from cursor.takes("}")):
            break
        if not (yield from cursor.takes(",")):
            return told
    if not told and name is not None and not needs_arguments:
        tell("{}")
    return told


def whole_characters(text: str) -> str:
    """Replace lone surrogates, which JSON escapes can produce, by U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def brackets(cursor: Cursor, give: Callable[[str], None], limit: int | None = None) -> Reading[bool]:
    """Pass a JSON object's text to `give`. Returns False if it is not closed before the end of the text or `limit`."""
    depth, quoted, escaped = 0, False, False
    while True:
        start = cursor.at
        end = len(cursor.text) if limit is None else min(limit, len(cursor.text))
        for place in range(start, end):
            char = cursor.text[place]
            if quoted:
                quoted = escaped or char != '"'
                escaped = not escaped and char == "\\"
            elif char == '"':
                quoted = True
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
                if depth == 0:
                    cursor.at = place + 1
                    give(cursor.text[start : place + 1])
                    return True
        cursor.at = end
        give(cursor.text[start:end])
        if cursor.ended or end == limit:
            return False
        yield


def _arguments(cursor: Cursor, limit: int) -> Reading[str | None]:
    """Parse arguments of a candidate call: an object, an object in a string, or null. None if it is none of these."""
    char = yield from cursor.peek()
    if char == "{":
        pieces: list[str] = []
        return "".join(pieces) if (yield from brackets(cursor, pieces.append, limit)) else None
    if char == '"':
        text = yield from _string(cursor, limit)
        return text if text is not None and text.lstrip().startswith("{") else None
    return "{}" if (yield from cursor.takes("null")) else None


def _string(cursor: Cursor, limit: int | None) -> Reading[str | None]:
    """Parse a JSON string; None if there is none."""
    if not (yield from cursor.takes('"')):
        return None
    written, escaped = '"', False
    while (char := (yield from cursor.peek())) and (limit is None or cursor.at < limit):
        cursor.at += 1
        written += char
        if char == '"' and not escaped:
            try:
                value: str = json.loads(written)
            except ValueError:
                return None
            return whole_characters(value)
        escaped = not escaped and char == "\\"
    return None
