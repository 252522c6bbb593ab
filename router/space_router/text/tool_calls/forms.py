"""Parsers of the tool call formats of model families."""

import ast
import json
from collections.abc import Mapping
from typing import Any

from space_router.text.tool_calls.call_object import MAX_UNCERTAIN, brackets, call_object, whole_characters
from space_router.text.tool_calls.parser import Cursor, Reading, Telling, content_until

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"


def hermes(cursor: Cursor, telling: Telling, tools: frozenset[str]) -> Reading[None]:
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number, anywhere."""
    while (yield from content_until(cursor, telling, OPEN)):
        cursor.keep()
        cursor.at += len(OPEN)
        yield from cursor.skip()
        if (yield from call_object(cursor, telling, tools, needs_arguments=False)):
            yield from cursor.skip()
            yield from cursor.takes(CLOSE)
        else:
            _no_call(cursor, telling, OPEN)


def llama3_json(cursor: Cursor, telling: Telling, tools: frozenset[str]) -> Reading[None]:
    """`{"name": "f", "parameters": {...}}` at a line start or after <|python_tag|>; more calls after `;` or `,`."""
    begins = True  # only white space precedes it in its line
    while char := (yield from cursor.peek()):
        cursor.keep()
        if (begins and char == "{") or (char == "<" and (yield from cursor.takes(PYTHON_TAG))):
            yield from cursor.skip()
            begins = False
            if (yield from call_object(cursor, telling, tools, needs_arguments=True)):
                yield from _more_objects(cursor, telling, tools)
            else:
                _no_call(cursor, telling, "{" if char == "{" else PYTHON_TAG)
        else:
            cursor.let_go()
            cursor.at += 1
            telling.content(char)
            begins = char == "\n" or (begins and char in " \t")


def _more_objects(cursor: Cursor, telling: Telling, tools: frozenset[str]) -> Reading[None]:
    """Parse further calls after a call."""
    while True:
        cursor.keep()
        yield from cursor.skip()
        if not (yield from cursor.takes(";")):
            yield from cursor.takes(",")
        yield from cursor.skip()
        if not (yield from call_object(cursor, telling, tools, needs_arguments=True)):
            cursor.back()
            return


def mistral(cursor: Cursor, telling: Telling, tools: frozenset[str]) -> Reading[None]:
    """`[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]`, or `[TOOL_CALLS]f[ARGS]{...}` for each call."""
    while (yield from content_until(cursor, telling, TOOL_CALLS)):
        cursor.keep()
        cursor.at += len(TOOL_CALLS)
        yield from cursor.skip()
        listed = yield from cursor.takes("[")
        if not listed and (yield from cursor.peek()) != "{":
            found = yield from _named_call(cursor, telling, tools)
        else:
            yield from cursor.skip()
            found = yield from call_object(cursor, telling, tools, needs_arguments=False)
        if not found:
            _no_call(cursor, telling, TOOL_CALLS)
        elif listed:
            yield from _rest_of_list(cursor, telling, tools)


def _rest_of_list(cursor: Cursor, telling: Telling, tools: frozenset[str]) -> Reading[None]:
    """`, {...}, {...}]`"""
    while True:
        yield from cursor.skip()
        if (yield from cursor.takes("]")):
            return
        cursor.keep()
        if not (yield from cursor.takes(",")):
            return cursor.let_go()
        yield from cursor.skip()
        if not (yield from call_object(cursor, telling, tools, needs_arguments=False)):
            return cursor.back()


def _named_call(cursor: Cursor, telling: Telling, tools: frozenset[str]) -> Reading[bool]:
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
    telling.call(name)
    cursor.let_go()
    if (yield from brackets(cursor, telling.arguments)):
        telling.whole()
    return True


def pythonic(cursor: Cursor, telling: Telling, tools: frozenset[str]) -> Reading[None]:
    """`[f(a=1, b="x"), g()]` at the start of the text, alone or between <|python_start|> and <|python_end|>."""
    cursor.keep()
    yield from cursor.skip()
    yield from cursor.takes(PYTHON_START)
    yield from cursor.skip()
    num_before = telling.num_calls
    if (yield from cursor.takes("[")):
        yield from _python_calls(cursor, telling, tools)
    if telling.num_calls == num_before:
        cursor.back()
    while (yield from cursor.peek()):
        telling.content(cursor.text[cursor.at :])
        cursor.at = len(cursor.text)


def _python_calls(cursor: Cursor, telling: Telling, tools: frozenset[str]) -> Reading[None]:
    """Parse `f(a=1), g()]`; the cursor returns to the start of anything that is not a call."""
    while True:
        yield from cursor.skip()
        name = yield from cursor.run(_in_name, 64)
        written = yield from _parentheses(cursor)
        arguments = None if name not in tools or written is None else _keywords(written)
        if arguments is None:
            return cursor.back()
        cursor.let_go()
        telling.call(name)
        telling.arguments(whole_characters(json.dumps(arguments, ensure_ascii=False)))
        telling.whole()
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


def _no_call(cursor: Cursor, telling: Telling, word: str) -> None:
    """Report `word`, which starts at the mark and does not begin a call, as content, and continue after it."""
    cursor.back()
    cursor.at += len(word)
    telling.content(word)
