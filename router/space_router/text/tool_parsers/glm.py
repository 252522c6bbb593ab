"""GLM-4.5 and later: `<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`; Hy3 in longer tags."""

import json
from dataclasses import dataclass

from space_router.text.tool_calls import (
    CLOSE,
    OPEN,
    CallCollector,
    Cursor,
    Form,
    Reading,
    Tools,
    content_until,
    no_call,
)
from space_router.text.tool_parsers.values import kinds_of, value_until


@dataclass(frozen=True)
class PairTags:
    """How a family writes its tags."""

    call: str = OPEN  # a name follows
    call_end: str = CLOSE
    key: str = "<arg_key>"
    key_end: str = "</arg_key>"
    value: str = "<arg_value>"
    value_end: str = "</arg_value>"
    name_end: str = ""  # behind the name
    opening: str = ""  # before all calls
    closing: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(text for text in vars(self).values() if text)


GLM = PairTags()


def hy3(suffix: str) -> PairTags:
    """Return Hy3's tags. `suffix`: stands in each, as `:opensource`."""

    def tag(name: str) -> str:
        return f"<{name}{suffix}>"

    calls, keys, values = ((tag(name), tag(f"/{name}")) for name in ("tool_call", "arg_key", "arg_value"))
    return PairTags(*calls, *keys, *values, tag("tool_sep"), tag("tool_calls"), tag("/tool_calls"))


def pair_calls(tags: PairTags) -> Form:
    """Return the parser of any number of calls, anywhere. The opening tag may be missing."""
    starts = tuple(text for text in (tags.opening, tags.call) if text)

    def form(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
        while (yield from content_until(cursor, output, starts)):
            cursor.keep()
            word = next(start for start in starts if cursor.text.startswith(start, cursor.at))
            cursor.at += len(word)
            yield from cursor.skip()
            if word == tags.opening:
                yield from cursor.takes(tags.call)
                yield from cursor.skip()
            name = yield from cursor.run(lambda char: char not in "<\n \t\r", 128)
            yield from cursor.skip()
            yield from cursor.takes(tags.name_end)
            yield from cursor.skip()
            begins = (yield from cursor.takes(tags.key)) if name in tools else False
            if name not in tools or not (begins or (yield from cursor.takes(tags.call_end))):
                no_call(cursor, output, word)
                continue
            cursor.let_go()
            output.call(name)
            output.arguments("{")
            if begins and not (yield from _arguments(tags, cursor, output, tools, name)):
                return
            output.arguments("}")
            output.is_whole = True
            if tags.closing:
                yield from cursor.skip()
                yield from cursor.takes(tags.closing)

    return form


def _arguments(tags: PairTags, cursor: Cursor, output: CallCollector, tools: Tools, name: str) -> Reading[bool]:
    """Parse arguments behind the first key tag, to the end of the call. Returns False if the text ends before it."""
    separator = ""
    while True:
        key = (yield from cursor.run(lambda char: char != "<", 256)).strip()
        if not (yield from cursor.takes(tags.key_end)):
            return False
        yield from cursor.skip()
        if not (yield from cursor.takes(tags.value)):
            return False
        output.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        if not (yield from value_until(cursor, output, kinds_of(tools[name], key), (tags.value_end,), trim=False)):
            return False
        yield from cursor.takes(tags.value_end)
        yield from cursor.skip()
        if (yield from cursor.takes(tags.call_end)):
            return True
        if not (yield from cursor.takes(tags.key)):
            return False
