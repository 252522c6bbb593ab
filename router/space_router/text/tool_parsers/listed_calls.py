"""A list of calls as JSON, or as Python calls, behind a marker: Granite, Phi-4, Nemotron, FireFunction, LFM2."""

from space_router.text.tool_calls import (
    CallCollector,
    Cursor,
    Form,
    Reading,
    Tools,
    call_object,
    content_until,
    no_call,
    python_calls,
    rest_of_list,
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
            if end:
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
