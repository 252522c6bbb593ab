"""Calls between marker tokens, with arguments in JSON: DeepSeek V3, V3.1 and R1, Kimi K2, Solar, Functionary."""

from space_router.text.tool_calls import CallCollector, Cursor, Reading, Tools, brackets, content_until, no_call

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE, FENCE_END = "```json", "```"

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_END, KIMI_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"

SOLAR_CALL, SOLAR_NAME = "<|tool_call:begin|>", "<|tool_call:name|>"
SOLAR_ARGUMENTS, SOLAR_END = "<|tool_call:args|>", "<|tool_call:end|>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
RECIPIENT = ">>>"
_TO_USER = "all"


def deepseek(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """`function<sep>f` and arguments in a fence (V3, R1), or `f<sep>{...}` (V3.1), between call markers."""
    while (yield from content_until(cursor, output, (CALLS, CALL))):
        cursor.keep()
        word = CALLS if (yield from cursor.takes(CALLS)) else CALL
        yield from cursor.skip()
        if word == CALLS:
            yield from cursor.takes(CALL)
        else:
            yield from cursor.takes(word)
        name = (yield from cursor.run(_in_line, 128)).strip()
        yield from cursor.takes(SEPARATOR)
        yield from cursor.skip()
        if (yield from cursor.peek()) != "{":
            name = (yield from cursor.run(_in_line, 128)).strip()
            yield from cursor.skip()
            yield from cursor.takes(FENCE)
            yield from cursor.skip()
        yield from _call(cursor, output, tools, name, word, (FENCE_END, CALL_END, CALLS_END))


def kimi(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """`functions.f:0`, and arguments behind a marker, between call markers."""
    while (yield from content_until(cursor, output, (SECTION, KIMI_CALL))):
        cursor.keep()
        word = SECTION if (yield from cursor.takes(SECTION)) else KIMI_CALL
        yield from cursor.skip()
        yield from cursor.takes(KIMI_CALL)
        written = (yield from cursor.run(_in_line, 128)).strip()
        name = written.removeprefix("functions.").rpartition(":")[0] or written.removeprefix("functions.")
        yield from cursor.takes(KIMI_ARGUMENTS)
        yield from cursor.skip()
        yield from _call(cursor, output, tools, name, word, (KIMI_END, SECTION_END))


def solar(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """An id, a name and arguments, each behind a marker of its own."""
    while (yield from content_until(cursor, output, (SOLAR_CALL,))):
        cursor.keep()
        cursor.at += len(SOLAR_CALL)
        yield from cursor.run(_in_line, 128)
        yield from cursor.takes(SOLAR_NAME)
        name = (yield from cursor.run(_in_line, 128)).strip()
        yield from cursor.takes(SOLAR_ARGUMENTS)
        yield from cursor.skip()
        yield from _call(cursor, output, tools, name, SOLAR_CALL, (SOLAR_END,))


def functionary(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """`<function=f>{...}</function>`, any number."""
    while (yield from content_until(cursor, output, (FUNCTION,))):
        cursor.keep()
        cursor.at += len(FUNCTION)
        name = yield from cursor.run(lambda char: char not in "<>\r\n{", 128)
        if not (yield from cursor.takes(">")):
            no_call(cursor, output, FUNCTION)
            continue
        yield from cursor.skip()
        yield from _call(cursor, output, tools, name, FUNCTION, (FUNCTION_END,))


def functionary_32(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """`>>>all` and text, or `>>>f` and arguments, on lines of their own. The prompt ends with the first `>>>`."""
    word, is_first = "", True
    while is_first or (yield from content_until(cursor, output, (RECIPIENT,))):
        cursor.keep()
        word = RECIPIENT if (yield from cursor.takes(RECIPIENT)) else ""
        name = (yield from cursor.run(_in_line, 128)).strip()
        if name == _TO_USER and (yield from cursor.takes("\n")):
            cursor.let_go()
        elif name in tools and (yield from cursor.takes("\n")):
            yield from cursor.skip()
            yield from _call(cursor, output, tools, name, word, ())
        else:
            no_call(cursor, output, word)
        is_first = False


def _call(
    cursor: Cursor, output: CallCollector, tools: Tools, name: str, word: str, ends: tuple[str, ...]
) -> Reading[None]:
    """Parse arguments and any of `ends` behind them. `word`, at the mark, is content if this is no call of a tool."""
    if name not in tools or (yield from cursor.peek()) != "{":
        return no_call(cursor, output, word)
    output.call(name)
    cursor.let_go()
    output.is_whole = yield from brackets(cursor, output.arguments)
    for behind in ends:
        yield from cursor.skip()
        yield from cursor.takes(behind)


def _in_line(char: str) -> bool:
    return char not in "<\r\n{"
