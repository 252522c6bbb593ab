"""Calls in XML-like tags with a tag for each parameter.

As Qwen3-Coder, Seed-OSS, MiniMax-M2, DeepSeek V3.2 and V4, and MiniCPM5 write them.
"""

import json
from dataclasses import dataclass, replace

from space_router.text.tool_calls import CallCollector, Cursor, Form, Reading, Tools, content_until, no_call
from space_router.text.tool_parsers.values import kinds_of, value_until


@dataclass(frozen=True)
class Tags:
    """How a family writes its tags."""

    opening: str  # before one call or several; "": none
    closing: str
    function: str  # its name follows
    name_end: str
    function_end: str
    parameter: str  # its name follows
    key_end: str
    parameter_end: str = "</parameter>"
    typed: tuple[str, str] | None = None  # in place of `key_end`: before a text, and before JSON
    raw: tuple[str, str] = ("", "")  # what may stand around a value, inside its tags


QWEN = Tags("<tool_call>", "</tool_call>", "<function=", ">", "</function>", "<parameter=", ">")
SEED = Tags("<seed:tool_call>", "</seed:tool_call>", "<function=", ">", "</function>", "<parameter=", ">")
MINIMAX = Tags(
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">', "</invoke>", '<parameter name="', '">'
)
_DSML = ('" string="true">', '" string="false">')
DEEPSEEK_32 = Tags(
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    '<｜DSML｜invoke name="',
    '">',
    "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="',
    '"',
    "</｜DSML｜parameter>",
    typed=_DSML,
)
DEEPSEEK_4 = replace(DEEPSEEK_32, opening="<｜DSML｜tool_calls>", closing="</｜DSML｜tool_calls>")
GLIMMER = Tags(
    "<atem:function_calls>",
    "</atem:function_calls>",
    '<atem:invoke name="',
    '">',
    "</atem:invoke>",
    '<atem:parameter name="',
    '">',
    "</atem:parameter>",
)

MINICPM = Tags(
    "", "", '<function name="', '">', "</function>", '<param name="', '">', "</param>", raw=("<![CDATA[", "]]>")
)


def xml_calls(tags: Tags) -> Form:
    """Return the parser of a family. The opening tag may be missing, as models leave it out."""
    starts = tuple(text for text in (tags.opening, tags.function) if text)

    def form(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
        while (yield from content_until(cursor, output, starts)):
            cursor.keep()
            opened = tags.opening != "" and (yield from cursor.takes(tags.opening))
            if not opened:
                cursor.at += len(tags.function)
            found = yield from _calls(tags, cursor, output, tools, begun=not opened)
            if not found:
                no_call(cursor, output, tags.opening if opened else tags.function)

    return form


def _calls(tags: Tags, cursor: Cursor, output: CallCollector, tools: Tools, *, begun: bool) -> Reading[bool]:
    """Parse calls until their closing tag. `begun`: the first function tag is read already."""
    num_calls = 0
    while True:
        if not begun:
            if num_calls:
                cursor.keep()
            yield from cursor.skip()
            if not (yield from cursor.takes(tags.function)):
                if num_calls:
                    cursor.let_go()
                    yield from cursor.takes(tags.closing)
                return num_calls > 0
        begun = False
        name = yield from cursor.run(lambda char: char not in tags.name_end + "<\n", 128)
        if name not in tools or not (yield from cursor.takes(tags.name_end)):
            if num_calls:
                cursor.back()
            return num_calls > 0
        cursor.let_go()
        output.call(name)
        num_calls += 1
        if not (yield from _parameters(tags, cursor, output, tools, name)):
            return True


def _parameters(tags: Tags, cursor: Cursor, output: CallCollector, tools: Tools, name: str) -> Reading[bool]:
    """Parse the parameters of a call. Returns False if the text ends inside."""
    output.arguments("{")
    separator = ""
    while True:
        yield from cursor.skip()
        if (yield from cursor.takes(tags.function_end)):
            break
        if not (yield from cursor.takes(tags.parameter)):
            if not (yield from cursor.peek()):
                return False
            if tags.closing and cursor.text.startswith(tags.closing, cursor.at):
                break
            cursor.at += 1  # text between parameters has no meaning
            continue
        key = yield from cursor.run(lambda char: char not in tags.key_end + "\n", 256)
        kinds = kinds_of(tools[name], key)
        if tags.typed is not None and (yield from cursor.takes(tags.typed[0])):
            kinds = kinds or frozenset({"string"})
        elif not (yield from cursor.takes(tags.typed[1] if tags.typed else tags.key_end)):
            return False
        output.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        ends: tuple[str, ...] = (tags.parameter_end, tags.parameter, tags.function_end)
        opening, closing = tags.raw
        is_raw = opening != "" and (yield from cursor.takes(opening))
        if opening and not is_raw and cursor.ended and opening.startswith(cursor.text[cursor.at :]):
            return False
        if is_raw:
            ends = (closing + tags.parameter_end, f"{closing}\n{tags.parameter_end}")
        if not (yield from value_until(cursor, output, kinds, ends, trim=tags.typed is None and not is_raw)):
            return False
        if is_raw:
            yield from cursor.takes(closing)
            yield from cursor.skip()
        yield from cursor.takes(tags.parameter_end)
    output.arguments("}")
    output.is_whole = True
    return True
