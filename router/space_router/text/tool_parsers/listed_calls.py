"""Calls as JSON, or as Python calls, in a list or one a line, behind a marker.

As Granite, Phi-4, Nemotron, FireFunction, LFM2, Command-R, Hunyuan, MiniMax-M1, GigaChat, Apertus, Olmo 3 and xLAM do.
"""

from space_router.text.tool_calls import (
    MAX_UNCERTAIN,
    CallCollector,
    Cursor,
    Form,
    Reading,
    Tools,
    brackets,
    call_object,
    content_until,
    no_call,
    python_call,
    python_calls,
    rest_of_list,
    string,
)


def listed_calls(marker: str, end: str = "") -> Form:
    """Return the parser of `marker [{"name": "f", "arguments": {...}}, ...] end`."""

    def form(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
        while (yield from content_until(cursor, output, (marker,))):
            cursor.keep()
            cursor.at += len(marker)
            yield from cursor.skip()
            listed = yield from cursor.takes("[")
            yield from cursor.skip()
            if not (yield from call_object(cursor, output, tools, needs_arguments=False)):
                no_call(cursor, output, marker)
                continue
            if listed:
                yield from rest_of_list(cursor, output, tools)
            else:
                yield from _further_lines(cursor, output, tools)
            if end:
                yield from cursor.skip()
                yield from cursor.takes(end)

    return form


def _further_lines(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """More calls, each an object on its own."""
    while True:
        cursor.keep()
        yield from cursor.skip()
        if not (yield from call_object(cursor, output, tools, needs_arguments=False)):
            return cursor.back()


def named_objects(marker: str, end: str) -> Form:
    """Return the parser of `marker [{"f": {...}}, {"g": {}}] end`."""

    def form(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
        while (yield from content_until(cursor, output, (marker,))):
            cursor.keep()
            cursor.at += len(marker)
            yield from cursor.skip()
            yield from cursor.takes("[")
            num_before = output.num_calls
            while (yield from _named_object(cursor, output, tools)):
                cursor.keep()
                yield from cursor.skip()
                if not (yield from cursor.takes(",")):
                    break
            if output.num_calls == num_before:
                no_call(cursor, output, marker)
                continue
            cursor.let_go()
            yield from cursor.skip()
            yield from cursor.takes("]")
            yield from cursor.skip()
            yield from cursor.takes(end)

    return form


def _named_object(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[bool]:
    """`{"f": {...}}`"""
    yield from cursor.skip()
    if not (yield from cursor.takes("{")):
        return False
    yield from cursor.skip()
    name = yield from string(cursor, cursor.at + MAX_UNCERTAIN)
    yield from cursor.skip()
    if name is None or name not in tools or not (yield from cursor.takes(":")):
        return False
    yield from cursor.skip()
    if (yield from cursor.peek()) != "{":
        return False
    cursor.let_go()
    output.call(name)
    output.is_whole = yield from brackets(cursor, output.arguments)
    yield from cursor.skip()
    return output.is_whole and (yield from cursor.takes("}"))


def list_at_start(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """`[{"name": "f", "arguments": {...}}, ...]` at the start of the text or of a fenced block."""
    fence = "```json"
    cursor.keep()
    yield from cursor.skip()
    yield from cursor.takes(fence)
    if (yield from _list(cursor, output, tools)):
        yield from cursor.skip()
        yield from cursor.takes("```")
    else:
        cursor.back()
    while (yield from content_until(cursor, output, (fence,))):
        cursor.keep()
        cursor.at += len(fence)
        if (yield from _list(cursor, output, tools)):
            yield from cursor.skip()
            yield from cursor.takes("```")
        else:
            no_call(cursor, output, fence)


def _list(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[bool]:
    yield from cursor.skip()
    if not (yield from cursor.takes("[")):
        return False
    yield from cursor.skip()
    if not (yield from call_object(cursor, output, tools, needs_arguments=False)):
        return False
    yield from rest_of_list(cursor, output, tools)
    return True


def python_lines(marker: str, end: str) -> Form:
    """Return the parser of `marker f(a=1)`, further calls on lines of their own, and `end`."""

    def form(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
        while (yield from content_until(cursor, output, (marker,))):
            cursor.keep()
            cursor.at += len(marker)
            num_before = output.num_calls
            while (yield from python_call(cursor, output, tools)):
                cursor.keep()
            if output.num_calls == num_before:
                no_call(cursor, output, marker)
                continue
            cursor.back()
            yield from cursor.skip()
            yield from cursor.takes(end)

    return form


def marked_python(marker: str, end: str) -> Form:
    """Return the parser of `marker [f(a=1), g()] end`."""

    def form(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
        while (yield from content_until(cursor, output, (marker,))):
            cursor.keep()
            cursor.at += len(marker)
            yield from cursor.skip()
            num_before = output.num_calls
            if (yield from cursor.takes("[")):
                yield from python_calls(cursor, output, tools)
            if output.num_calls == num_before:
                no_call(cursor, output, marker)
                continue
            yield from cursor.skip()
            yield from cursor.takes(end)

    return form
