"""GLM-4.5 and later: `<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`."""

import json

from space_router.text.tool_calls import CLOSE, OPEN, CallCollector, Cursor, Reading, Tools, content_until, no_call
from space_router.text.tool_parsers.values import kinds_of, value_until

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def glm(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """Any number of calls, anywhere."""
    while (yield from content_until(cursor, output, (OPEN,))):
        cursor.keep()
        cursor.at += len(OPEN)
        yield from cursor.skip()
        name = yield from cursor.run(lambda char: char not in "<\n \t\r", 128)
        yield from cursor.skip()
        begins = (yield from cursor.takes(KEY)) if name in tools else False
        if name not in tools or not (begins or (yield from cursor.takes(CLOSE))):
            no_call(cursor, output, OPEN)
            continue
        cursor.let_go()
        output.call(name)
        output.arguments("{")
        if begins and not (yield from _arguments(cursor, output, tools, name)):
            return
        output.arguments("}")
        output.is_whole = True


def _arguments(cursor: Cursor, output: CallCollector, tools: Tools, name: str) -> Reading[bool]:
    """Parse arguments behind the first <arg_key>, to the end of the call. Returns False if the text ends before it."""
    separator = ""
    while True:
        key = (yield from cursor.run(lambda char: char != "<", 256)).strip()
        if not (yield from cursor.takes(KEY_END)):
            return False
        yield from cursor.skip()
        if not (yield from cursor.takes(VALUE)):
            return False
        output.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        if not (yield from value_until(cursor, output, kinds_of(tools[name], key), (VALUE_END,), trim=False)):
            return False
        yield from cursor.takes(VALUE_END)
        yield from cursor.skip()
        if (yield from cursor.takes(CLOSE)):
            return True
        if not (yield from cursor.takes(KEY)):
            return False
