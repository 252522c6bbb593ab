"""Calls of Kimi K3: tags of three special tokens, with attributes, and a tag for each argument that says its type."""

import json

from space_router.text.tool_calls import CallCollector, Cursor, Reading, Tools, brackets, content_until, no_call
from space_router.text.tool_parsers.notations import Notation, in_typed_tags
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


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _kind_head(kind: str) -> str:
    return f' type="{"number" if kind == "integer" else kind}"{END}'


def _key_head(name: str) -> str:
    return f'{_ARGUMENT} key="{_attribute(name)}"'


ARGUMENTS: Notation = in_typed_tags(_key_head, _kind_head, closing("argument"))
"""`<|open|>argument key="a" type="string"<|sep|>x<|close|>argument<|sep|>`"""


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
    seen: set[str] = set()
    while (yield from cursor.takes(_ARGUMENT)):
        attributes = yield from _attributes(cursor)
        if "key" not in attributes:
            return False
        is_new, separator = attributes["key"] not in seen, ", " if seen else ""
        seen.add(attributes["key"])
        if is_new:
            output.arguments(f"{separator}{json.dumps(attributes['key'], ensure_ascii=False)}: ")
        kept = output if is_new else CallCollector()  # of what is repeated the first is kept
        kinds = frozenset({attributes.get("type", "string")})
        if not (yield from value_until(cursor, kept, kinds, (closing("argument"), closing("call")), trim=False)):
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
