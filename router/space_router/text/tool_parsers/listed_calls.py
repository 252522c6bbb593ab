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


def behind_marker(marker: str, calls: Form, end: str = "") -> Form:
    """Return the parser of `marker`, what `calls` reads, and `end`. A marker without a call behind it is content."""

    def form(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
        while (yield from content_until(cursor, output, (marker,))):
            cursor.keep()
            cursor.at += len(marker)
            yield from cursor.skip()
            num_before = output.num_calls
            yield from calls(cursor, output, tools)
            if output.num_calls == num_before:
                no_call(cursor, output, marker)
            elif end:
                yield from cursor.skip()
                yield from cursor.takes(end)

    return form


def listed_calls(marker: str, end: str = "") -> Form:
    """Return the parser of `marker [{"name": "f", "arguments": {...}}, ...] end`, also without brackets."""
    return behind_marker(marker, _objects, end)


def named_objects(marker: str, end: str) -> Form:
    """Return the parser of `marker [{"f": {...}}, {"g": {}}] end`."""
    return behind_marker(marker, _named_objects, end)


def python_lines(marker: str, end: str) -> Form:
    """Return the parser of `marker f(a=1)`, further calls on lines of their own, and `end`."""
    return behind_marker(marker, _python_lines, end)


def marked_python(marker: str, end: str) -> Form:
    """Return the parser of `marker [f(a=1), g()] end`."""
    return behind_marker(marker, _python_list, end)


def _objects(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """`[{...}, {...}]`, or `{...}` and more of them on lines of their own."""
    listed = yield from cursor.takes("[")
    yield from cursor.skip()
    if (yield from call_object(cursor, output, tools, needs_arguments=False)):
        yield from (rest_of_list if listed else _further_lines)(cursor, output, tools)


def _further_lines(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """More calls, each an object on its own."""
    while True:
        cursor.keep()
        yield from cursor.skip()
        if not (yield from call_object(cursor, output, tools, needs_arguments=False)):
            return cursor.back()


def _named_objects(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    yield from cursor.takes("[")
    is_call = False
    while (yield from _named_object(cursor, output, tools)):
        is_call = True
        cursor.keep()
        yield from cursor.skip()
        if not (yield from cursor.takes(",")):
            break
    if is_call:
        cursor.let_go()
        yield from cursor.skip()
        yield from cursor.takes("]")


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
    cursor.keep()
    yield from cursor.skip()
    yield from _list(cursor, output, tools)
    if not output.num_calls:
        cursor.back()
    yield from _FENCED(cursor, output, tools)


def _list(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    if (yield from cursor.takes("[")):
        yield from cursor.skip()
        if (yield from call_object(cursor, output, tools, needs_arguments=False)):
            yield from rest_of_list(cursor, output, tools)


_FENCED = behind_marker("```json", _list, "```")


def _python_lines(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    is_call = False
    while (yield from python_call(cursor, output, tools)):
        is_call = True
        cursor.keep()
    if is_call:
        cursor.back()


def _python_list(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    if (yield from cursor.takes("[")):
        yield from python_calls(cursor, output, tools)
