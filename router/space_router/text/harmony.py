"""OpenAI's harmony format (gpt-oss): an answer is messages on channels, each behind a header of special tokens.

`<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>answer`, or a call:
`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>`.
"""

import json
import re
from collections.abc import Callable

from space_router.text.tool_calls import CallCollector, Cursor, Reading, Tools, content_until

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
MARKERS = (CHANNEL, MESSAGE, START, END, CALL, RETURN, CONSTRAIN)

_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


def harmony(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """Parse messages: those on the channel analysis are reasoning, those to a known function calls, others content."""
    while (yield from cursor.peek()):
        yield from content_until(cursor, output, (CHANNEL, START, " to="))
        if not (yield from cursor.peek()):
            return
        pieces: list[str] = []
        yield from content_until(cursor, output, (MESSAGE,), give=pieces.append)
        if not (yield from cursor.takes(MESSAGE)):
            return
        header = "".join(pieces)
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None and recipient[1] in tools:
            yield from _call(recipient[1], cursor, output)
        elif channel is not None and channel[1] == "analysis":
            if output.has_thought:
                output.thought("\n")
            output.is_thinking = True
            yield from _body(cursor, output, output.thought)
            output.is_thinking = not (yield from cursor.peek())
        else:
            yield from _body(cursor, output, output.content)
        for end in (END, CALL, RETURN):
            yield from cursor.takes(end)


def _call(name: str, cursor: Cursor, output: CallCollector) -> Reading[None]:
    output.call(name)
    written: list[str] = []

    def give(text: str) -> None:
        written.append(text)
        output.arguments(text)

    yield from cursor.skip()
    yield from _body(cursor, output, give)
    output.is_whole = _is_json("".join(written))


def _body(cursor: Cursor, output: CallCollector, give: Callable[[str], None]) -> Reading[None]:
    yield from content_until(cursor, output, (END, CALL, RETURN, START, CHANNEL), give=give, all_text=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
