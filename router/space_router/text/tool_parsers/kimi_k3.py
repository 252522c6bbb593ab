"""Calls of Kimi K3: tags of three special tokens, with attributes, and a tag for each argument that says its type."""

import json

from space_router.text.tool_calls import CallCollector, Cursor, Reading, Tools, brackets, content_until, no_call
from space_router.text.tool_parsers.values import value_until

TAG, CLOSING, END = "<|open|>", "<|close|>", "<|sep|>"
MARKERS = (TAG, CLOSING, END)


def opening(name: str) -> str:
    return f"{TAG}{name}{END}"


def closing(name: str) -> str:
    return f"{CLOSING}{name}{END}"


_CALL, _ARGUMENT, _JSON = f"{TAG}call", f"{TAG}argument", f"{TAG}json"
_AROUND = (
    opening("response"), closing("response"), opening("tools"), closing("tools"), closing("message"), closing("think"),
)  # fmt: skip
"""What stands around answers and calls."""


def kimi_k3(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """`<|open|>call tool="f" index="1"<|sep|>`, its arguments, and `<|close|>call<|sep|>`. Tags around it are left
    out, as are those around an answer."""
    tags = (*_AROUND, f"{_CALL} ")
    while (yield from content_until(cursor, output, tags)):
        around = next((tag for tag in _AROUND if cursor.text.startswith(tag, cursor.at)), None)
        if around is not None:
            cursor.at += len(around)
            continue
        cursor.keep()
        cursor.at += len(_CALL)
        attributes = yield from _attributes(cursor)
        name = attributes.get("tool", "")
        if name not in tools:
            no_call(cursor, output, _CALL)
            continue
        output.call(name)
        cursor.let_go()
        output.is_whole = yield from _arguments(cursor, output)
        if not output.is_whole:  # what is left of a broken call is no content
            yield from content_until(cursor, output, tags, give=lambda text: None)


def _arguments(cursor: Cursor, output: CallCollector) -> Reading[bool]:
    """Parse the arguments of a call and what ends it. Returns False if the text ends inside."""
    if (yield from cursor.takes(_JSON)):
        yield from _attributes(cursor)
        if (yield from cursor.peek()) != "{" or not (yield from brackets(cursor, output.arguments)):
            return False
        yield from cursor.takes(closing("json"))
        yield from cursor.takes(closing("call"))
        return True
    output.arguments("{")
    separator = ""
    while (yield from cursor.takes(_ARGUMENT)):
        attributes = yield from _attributes(cursor)
        if "key" not in attributes:
            return False
        output.arguments(f"{separator}{json.dumps(attributes['key'], ensure_ascii=False)}: ")
        separator = ", "
        kinds = frozenset({attributes.get("type", "string")})
        if not (yield from value_until(cursor, output, kinds, (closing("argument"), closing("call")), trim=False)):
            return False
        yield from cursor.takes(closing("argument"))
    if not (yield from cursor.takes(closing("call"))):
        return False
    output.arguments("}")
    return True


def _attributes(cursor: Cursor) -> Reading[dict[str, str]]:
    """Parse ` name="value"`, any number, and the end of the tag; none if they are anything else."""
    found: dict[str, str] = {}
    while (yield from cursor.takes(" ")):
        name = yield from cursor.run(lambda char: char.isalpha(), 32)
        if not (yield from cursor.takes('="')):
            return {}
        value = yield from cursor.run(lambda char: char not in '"<', 1024)
        if not (yield from cursor.takes('"')):
            return {}
        found[name] = value.replace("&quot;", '"').replace("&amp;", "&")
    return found if (yield from cursor.takes(END)) else {}
