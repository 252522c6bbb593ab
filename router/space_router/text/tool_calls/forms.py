"""Parsers of the tool call formats of model families."""

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any

from space_router.text.tool_calls.parser import CallCollector, Cursor, Reading, content_until

NAME_KEYS = frozenset({"name", "function"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
OTHER_KEYS = frozenset({"type", "id"})

MAX_UNCERTAIN = 16 * 1024
"""A candidate that is still not known to be a call after this many characters is content."""


def call_object(
    cursor: Cursor, output: CallCollector, tools: frozenset[str], *, needs_arguments: bool
) -> Reading[bool]:
    """Parse one call and report its arguments as they arrive. Returns False, reporting nothing, if it is not a call.

    The caller marks the start with `cursor.keep`; the mark is dropped once the object is known to be a call.
    """
    limit = cursor.at + MAX_UNCERTAIN
    name: str | None = None
    early: str | None = None  # arguments that precede the name
    reported = False

    def report(arguments: str) -> None:
        """Report a call. Empty `arguments`: they follow."""
        nonlocal reported
        if name is not None:
            output.call(name)
            cursor.let_go()
            reported = True
            output.arguments(arguments)
            if arguments:
                output.whole()

    if not (yield from cursor.takes("{")):
        return False
    while True:
        yield from cursor.skip()
        key = yield from _string(cursor, None if reported else limit)
        yield from cursor.skip()
        if not (yield from cursor.takes(":")):
            return reported
        yield from cursor.skip()
        if key in NAME_KEYS and name is None:
            name = yield from _string(cursor, limit)
            if name not in tools:
                return False
            if early is not None:
                report(early)
        elif key in ARGUMENT_KEYS and not reported and early is None:
            if name is not None and (yield from cursor.peek()) == "{":
                report("")
                if not (yield from brackets(cursor, output.arguments)):
                    return True
                output.whole()
            else:
                early = yield from _arguments(cursor, limit)
                if early is None:
                    return False
                if name is not None:
                    report(early)
        elif key not in OTHER_KEYS or (yield from _string(cursor, None if reported else limit)) is None:
            return reported
        yield from cursor.skip()
        if (yield from cursor.takes("}")):
            break
        if not (yield from cursor.takes(",")):
            return reported
    if not reported and name is not None and not needs_arguments:
        report("{}")
    return reported


def whole_characters(text: str) -> str:
    """Replace lone surrogates, which JSON escapes can produce, by U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def brackets(cursor: Cursor, give: Callable[[str], None], limit: int | None = None) -> Reading[bool]:
    """Pass a JSON object's text to `give`. Returns False if it is not closed before the end of the text or `limit`."""
    depth, quoted, escaped = 0, False, False
    while True:
        start = cursor.at
        end = len(cursor.text) if limit is None else min(limit, len(cursor.text))
        for place in range(start, end):
            char = cursor.text[place]
            if quoted:
                quoted = escaped or char != '"'
                escaped = not escaped and char == "\\"
            elif char == '"':
                quoted = True
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
                if depth == 0:
                    cursor.at = place + 1
                    give(cursor.text[start : place + 1])
                    return True
        cursor.at = end
        give(cursor.text[start:end])
        if cursor.ended or end == limit:
            return False
        yield


def _arguments(cursor: Cursor, limit: int) -> Reading[str | None]:
    """Parse arguments of a candidate call: an object, an object in a string, or null. None if it is none of these."""
    char = yield from cursor.peek()
    if char == "{":
        pieces: list[str] = []
        return "".join(pieces) if (yield from brackets(cursor, pieces.append, limit)) else None
    if char == '"':
        text = yield from _string(cursor, limit)
        return text if text is not None and text.lstrip().startswith("{") else None
    return "{}" if (yield from cursor.takes("null")) else None


def _string(cursor: Cursor, limit: int | None) -> Reading[str | None]:
    """Parse a JSON string; None if there is none."""
    if not (yield from cursor.takes('"')):
        return None
    written, escaped = '"', False
    while (char := (yield from cursor.peek())) and (limit is None or cursor.at < limit):
        cursor.at += 1
        written += char
        if char == '"' and not escaped:
            try:
                value: str = json.loads(written)
            except ValueError:
                return None
            return whole_characters(value)
        escaped = not escaped and char == "\\"
    return None


OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"


def hermes(cursor: Cursor, output: CallCollector, tools: frozenset[str]) -> Reading[None]:
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number, anywhere."""
    while (yield from content_until(cursor, output, OPEN)):
        cursor.keep()
        cursor.at += len(OPEN)
        yield from cursor.skip()
        if (yield from call_object(cursor, output, tools, needs_arguments=False)):
            yield from cursor.skip()
            yield from cursor.takes(CLOSE)
        else:
            _no_call(cursor, output, OPEN)


def llama3_json(cursor: Cursor, output: CallCollector, tools: frozenset[str]) -> Reading[None]:
    """`{"name": "f", "parameters": {...}}` at a line start or after <|python_tag|>; more calls after `;` or `,`."""
    begins = True  # only white space precedes it in its line
    while char := (yield from cursor.peek()):
        cursor.keep()
        if (begins and char == "{") or (char == "<" and (yield from cursor.takes(PYTHON_TAG))):
            yield from cursor.skip()
            begins = False
            if (yield from call_object(cursor, output, tools, needs_arguments=True)):
                yield from _more_objects(cursor, output, tools)
            else:
                _no_call(cursor, output, "{" if char == "{" else PYTHON_TAG)
        else:
            cursor.let_go()
            cursor.at += 1
            output.content(char)
            begins = char == "\n" or (begins and char in " \t")


def _more_objects(cursor: Cursor, output: CallCollector, tools: frozenset[str]) -> Reading[None]:
    """Parse further calls after a call."""
    while True:
        cursor.keep()
        yield from cursor.skip()
        if not (yield from cursor.takes(";")):
            yield from cursor.takes(",")
        yield from cursor.skip()
        if not (yield from call_object(cursor, output, tools, needs_arguments=True)):
            cursor.back()
            return


def mistral(cursor: Cursor, output: CallCollector, tools: frozenset[str]) -> Reading[None]:
    """`[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]`, or `[TOOL_CALLS]f[ARGS]{...}` for each call."""
    while (yield from content_until(cursor, output, TOOL_CALLS)):
        cursor.keep()
        cursor.at += len(TOOL_CALLS)
        yield from cursor.skip()
        listed = yield from cursor.takes("[")
        if not listed and (yield from cursor.peek()) != "{":
            found = yield from _named_call(cursor, output, tools)
        else:
            yield from cursor.skip()
            found = yield from call_object(cursor, output, tools, needs_arguments=False)
        if not found:
            _no_call(cursor, output, TOOL_CALLS)
        elif listed:
            yield from _rest_of_list(cursor, output, tools)


def _rest_of_list(cursor: Cursor, output: CallCollector, tools: frozenset[str]) -> Reading[None]:
    """`, {...}, {...}]`"""
    while True:
        yield from cursor.skip()
        if (yield from cursor.takes("]")):
            return
        cursor.keep()
        if not (yield from cursor.takes(",")):
            return cursor.let_go()
        yield from cursor.skip()
        if not (yield from call_object(cursor, output, tools, needs_arguments=False)):
            return cursor.back()


def _named_call(cursor: Cursor, output: CallCollector, tools: frozenset[str]) -> Reading[bool]:
    """`f[ARGS]{...}`, also with `[CALL_ID]...` before the arguments."""
    name = yield from cursor.run(_in_name, 64)
    if name not in tools:
        return False
    if (yield from cursor.takes(CALL_ID)):
        yield from cursor.run(_in_name, 64)
    yield from cursor.takes(ARGS)
    yield from cursor.skip()
    if (yield from cursor.peek()) != "{":
        return False
    output.call(name)
    cursor.let_go()
    if (yield from brackets(cursor, output.arguments)):
        output.whole()
    return True


def pythonic(cursor: Cursor, output: CallCollector, tools: frozenset[str]) -> Reading[None]:
    """`[f(a=1, b="x"), g()]` at the start of the text, alone or between <|python_start|> and <|python_end|>."""
    cursor.keep()
    yield from cursor.skip()
    yield from cursor.takes(PYTHON_START)
    yield from cursor.skip()
    num_before = output.num_calls
    if (yield from cursor.takes("[")):
        yield from _python_calls(cursor, output, tools)
    if output.num_calls == num_before:
        cursor.back()
    while (yield from cursor.peek()):
        output.content(cursor.text[cursor.at :])
        cursor.at = len(cursor.text)


def _python_calls(cursor: Cursor, output: CallCollector, tools: frozenset[str]) -> Reading[None]:
    """Parse `f(a=1), g()]`; the cursor returns to the start of anything that is not a call."""
    while True:
        yield from cursor.skip()
        name = yield from cursor.run(_in_name, 64)
        written = yield from _parentheses(cursor)
        arguments = None if name not in tools or written is None else _keywords(written)
        if arguments is None:
            return cursor.back()
        cursor.let_go()
        output.call(name)
        output.arguments(whole_characters(json.dumps(arguments, ensure_ascii=False)))
        output.whole()
        yield from cursor.skip()
        if (yield from cursor.takes("]")):
            yield from cursor.skip()
            yield from cursor.takes(PYTHON_END)
            return
        cursor.keep()
        if not (yield from cursor.takes(",")):
            return cursor.let_go()


def _parentheses(cursor: Cursor) -> Reading[str | None]:
    """Read `(...)` by Python's rules: brackets in strings do not count. None if it is not closed."""
    written, depth, quote, escaped = "", 0, "", False
    while len(written) < MAX_UNCERTAIN and (char := (yield from cursor.peek())):
        if not written and char != "(":
            return None
        cursor.at += 1
        written += char
        if quote:
            quote = "" if char == quote and not escaped else quote
            escaped = not escaped and char == "\\"
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return written
    return None


class _Literals(ast.NodeTransformer):
    """Replaces JSON's true, false and null by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        values = {"true": True, "false": False, "null": None}
        return ast.copy_location(ast.Constant(values[node.id]), node) if node.id in values else node


def _keywords(written: str) -> Mapping[str, Any] | None:
    """Return the keyword arguments of `(...)`, or None unless all are literals that JSON can represent."""
    try:
        call = _Literals().visit(ast.parse("f" + written, mode="eval")).body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        json.dumps(values, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return values


def _in_name(char: str) -> bool:
    return char.isascii() and (char.isalnum() or char in "_-.")


def _no_call(cursor: Cursor, output: CallCollector, word: str) -> None:
    """Report `word`, which starts at the mark and does not begin a call, as content, and continue after it."""
    cursor.back()
    cursor.at += len(word)
    output.content(word)
