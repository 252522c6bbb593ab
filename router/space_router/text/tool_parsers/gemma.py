"""Gemma 4 and FunctionGemma: `call:f{a:<|"|>text<|"|>,b:[1,{c:true}]}` between marker tokens."""

from __future__ import annotations

import json
import re

from space_router.text.tool_calls import (
    CallCollector,
    Cursor,
    Form,
    Reading,
    Tools,
    content_until,
    no_call,
    whole_characters,
)

GEMMA_4 = ("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>")

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def gemma(markers: tuple[str, str, str]) -> Form:
    """Return the parser. `markers`: before a call, behind it, and around texts."""
    start, end, quote = markers

    def form(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
        while (yield from content_until(cursor, output, (start,))):
            cursor.keep()
            cursor.at += len(start)
            yield from cursor.skip()
            begins = yield from cursor.takes("call:")
            name = yield from cursor.run(lambda char: char not in "{<\r\n", 128)
            if not begins or name.strip() not in tools or not (yield from cursor.takes("{")):
                no_call(cursor, output, start)
                continue
            cursor.let_go()
            output.call(name.strip())
            output.is_whole = yield from _object(cursor, output, quote)
            if not output.is_whole:
                return
            yield from cursor.skip()
            yield from cursor.takes(end)

    return form


def _object(cursor: Cursor, output: CallCollector, quote: str) -> Reading[bool]:
    """Parse what follows `{`, to its `}`, with the objects and lists in it, however deep; of a key that an object
    repeats, the first value. Returns False if the text ends before it."""
    whole, nowhere = output, CallCollector()
    output.arguments("{")
    closings, separator = ["}"], ""
    keys: list[set[str]] = [set()]  # of each object or list that is open
    repeated = 0  # the depth of a key that is left out; 0: none is
    while closings:
        if repeated == len(closings):
            output, repeated = whole, 0
        yield from cursor.skip(" \t\r\n,")
        if (yield from cursor.takes(closings[-1])):
            output.arguments(closings.pop())
            keys.pop()
            separator = ", "
            continue
        if not (yield from cursor.peek()):
            return False
        if closings[-1] == "]":
            output.arguments(separator)
        else:
            key = yield from _key(cursor, output, quote)
            if key is None:
                return False
            if key in keys[-1] and not repeated:
                output, repeated = nowhere, len(closings)
            keys[-1].add(key)
            output.arguments(f"{separator}{key}: ")
        yield from cursor.skip()
        opening = yield from cursor.peek()
        if opening and opening in "{[":
            cursor.at += 1
            output.arguments(opening)
            closings.append("}" if opening == "{" else "]")
            keys.append(set())
            separator = ""
        elif (yield from _scalar(cursor, output, quote)):
            separator = ", "
        else:
            return False
    return True


def _key(cursor: Cursor, output: CallCollector, quote: str) -> Reading[str | None]:
    """Parse a key and its colon. Returns it as JSON; None if there is none."""
    if (yield from cursor.takes(quote)):
        parts: list[str] = []
        if not (yield from content_until(cursor, output, (quote,), give=parts.append, all_text=False)):
            return None
        yield from cursor.takes(quote)
        key = "".join(parts)
        yield from cursor.skip()
    else:
        key = (yield from cursor.run(lambda char: char not in ":}", 256)).strip()
    found = yield from cursor.takes(":")
    return json.dumps(whole_characters(key), ensure_ascii=False) if found else None


def _scalar(cursor: Cursor, output: CallCollector, quote: str) -> Reading[bool]:
    """Parse a text, a number or a word. Returns False if the text ends before it does."""
    if (yield from cursor.takes(quote)):
        output.arguments('"')

        def give(text: str) -> None:
            output.arguments(json.dumps(whole_characters(text), ensure_ascii=False)[1:-1])

        if not (yield from content_until(cursor, output, (quote,), give=give, all_text=False)):
            return False
        yield from cursor.takes(quote)
        output.arguments('"')
        return True
    word = (yield from cursor.run(lambda char: char not in ",}]", 4096)).strip()
    if not (yield from cursor.peek()):
        return False  # it may go on
    known = _WORDS.get(word.lower()) or (word if _NUMBER.fullmatch(word) else None)
    output.arguments(known or json.dumps(whole_characters(word), ensure_ascii=False))
    return True
