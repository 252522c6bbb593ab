"""Tool calls in text: an incremental parser, the formats of model families, and the grammars that require calls.

A reader splits text into content and calls. Its output is final: a call is given out once its name matches a tool and
its arguments have begun, content once it cannot become a call. Text that only resembles a call is content. White space
next to a call is content only between two pieces of content.
"""

import ast
import json
import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeVar

from space_common.grammar import AS_ANY_OF

from space_router.text import written_numbers
from space_router.text.tokenizer import SpecialTokens

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""A coroutine that yields when it needs more text and resumes where it stopped."""


@dataclass(frozen=True)
class CallPiece:
    """A piece of one call. The first piece has the name; the arguments are JSON as the model wrote it."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class Thought:
    """A piece of the reasoning before an answer."""

    text: str


@dataclass(frozen=True)
class ParsedText:
    """Parsed output: reasoning, content and pieces of calls, in order."""

    parts: tuple[str | Thought | CallPiece, ...]

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> tuple[CallPiece, ...]:
        return tuple(part for part in self.parts if isinstance(part, CallPiece))


class Cursor:
    """The text so far and the read position."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._kept: int | None = None  # position that `back` returns to

    def add(self, text: str) -> None:
        """Append text. Positions stay valid between `keep` and `let_go`; otherwise text already read is dropped."""
        if self._kept is None:
            self.text, self.at = self.text[self.at :], 0
        self.text += text

    def keep(self) -> None:
        """Mark the current position, for `back`."""
        self._kept = self.at

    def let_go(self) -> None:
        """Drop the mark."""
        self._kept = None

    def back(self) -> None:
        """Return to the mark."""
        if self._kept is not None:
            self.at, self._kept = self._kept, None

    def peek(self) -> Reading[str]:
        """Return the next character without consuming it; "" at the end of the text."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def takes(self, word: str) -> Reading[bool]:
        """Consume `word` if it comes next; return whether it did."""
        while True:
            there = self.text[self.at : self.at + len(word)]
            if there == word:
                self.at += len(word)
                return True
            if self.ended or not word.startswith(there):
                return False
            yield

    def skip(self, characters: str = " \t\r\n") -> Reading[None]:
        """Consume all following characters that are in `characters`."""
        while (char := (yield from self.peek())) and char in characters:
            self.at += 1

    def run(self, holds: Callable[[str], bool], most: int) -> Reading[str]:
        """Consume and return the following characters for which `holds` is true, `most` at most."""
        found = ""
        while len(found) < most and (char := (yield from self.peek())) and holds(char):
            self.at += 1
            found += char
        return found


class CallCollector:
    """Collects parsed output until `take` is called."""

    def __init__(self) -> None:
        self._space = ""  # after the latest content; dropped if only calls follow
        self._space_behind = ""  # white space after the latest call
        self._spoken = False  # there was content
        self._behind_call = False
        self._thought_space = ""  # after the latest reasoning; dropped if none follows
        self.has_thought = False  # there was reasoning
        self.is_thinking = False  # the text read so far ends in reasoning
        self._parts: list[str | Thought | CallPiece] = []
        self.num_calls = 0  # calls begun so far
        self.is_whole = True  # the latest call's arguments are complete

    def content(self, text: str) -> None:
        """Add text that is not part of a call."""
        if self._behind_call:
            words = text.lstrip()
            self._space_behind += text[: len(text) - len(words)]
            if not words:
                return
            self._space = (self._space or self._space_behind) if self._spoken else ""
            self._behind_call, text = False, words
        words = text.rstrip()
        if words:
            self._parts.append(self._space + words)
            self._space, self._spoken = "", True
        self._space += text[len(words) :]

    def thought(self, text: str) -> None:
        """Add reasoning. White space around it is dropped."""
        words = text.rstrip()
        if words:
            self._parts.append(Thought(self._thought_space + words))
            self._thought_space, self.has_thought = "", True
        self._thought_space += text[len(words) :] if self.has_thought else ""

    def call(self, name: str, arguments: str = "") -> None:
        """Begin a call. Empty `arguments`: they follow."""
        self._behind_call, self._space_behind = True, ""
        self._parts.append(CallPiece(self.num_calls, name, arguments))
        self.num_calls += 1
        self.is_whole = arguments != ""

    def arguments(self, text: str) -> None:
        """Add to the latest call's arguments."""
        last = self._parts[-1] if self._parts else None
        if isinstance(last, CallPiece):
            self._parts[-1] = replace(last, arguments=last.arguments + text)
        elif text:
            self._parts.append(CallPiece(self.num_calls - 1, None, text))

    def take(self, *, ended: bool) -> ParsedText:
        """Return the output since the last call. `ended`: the text is complete."""
        if ended and not self._behind_call and self._space:
            self._parts.append(self._space)
        parsed = ParsedText(tuple(self._parts))
        self._parts = []
        return parsed


Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The tools that may be called: the JSON schemas of their arguments, by name."""

Form: TypeAlias = Callable[[Cursor, CallCollector, Tools], Reading[None]]
"""Parser of one model family's format: reads the cursor to its end and reports to the collector."""


class ToolCallReader:
    """Splits one streamed text into content and calls of known tools.

    `forced`: a grammar allows nothing but calls. Then no text is content: what is left of a call that was cut before
    its name was certain is dropped, and if there is only one tool, it is a call of that with no arguments yet. A text
    that was cut in its reasoning has no call.
    """

    def __init__(self, form: Form, tools: Collection[str] | Tools, *, forced: bool = False) -> None:
        """`tools`: their names, or also the schemas of their arguments, for formats that do not write JSON."""
        self._cursor = Cursor()
        self.output = CallCollector()
        known: Tools = tools if isinstance(tools, Mapping) else {name: {} for name in tools}
        self._tools = known
        self._forced = forced
        self._reading: Iterator[None] = form(self._cursor, self.output, known)

    def push(self, text: str, *, ended: bool = False) -> ParsedText:
        """Read text; return the output that is now certain. `ended`: the text is complete."""
        self._cursor.add(text)
        self._cursor.ended = ended
        next(self._reading, None)
        if not self._forced:
            return self.output.take(ended=ended)
        if ended and not self.output.num_calls and len(self._tools) == 1 and not self.output.is_thinking:
            self.output.call(*self._tools)
        return ParsedText(tuple(part for part in self.output.take(ended=ended).parts if not isinstance(part, str)))


def content_until(
    cursor: Cursor,
    output: CallCollector,
    markers: tuple[str, ...],
    give: Callable[[str], None] | None = None,
    *,
    all_text: bool = True,
) -> Reading[bool]:
    """Report the text before the first of `markers` as content, or by `give`. Returns True at a marker, False at the
    end of the text. `all_text`: if false, what may be the beginning of a marker at the end of the text is dropped.
    """
    give = output.content if give is None else give
    while True:
        places = [place for marker in markers if (place := cursor.text.find(marker, cursor.at)) >= 0]
        if not (cursor.ended and all_text):
            places += [_start_of(marker, cursor.text, cursor.at) for marker in markers]
        place = min([*places, len(cursor.text)])
        give(cursor.text[cursor.at : place])
        cursor.at = place
        if cursor.text.startswith(markers, place):
            return True
        if cursor.ended:
            cursor.at = len(cursor.text)
            return False
        yield


def _start_of(marker: str, text: str, at: int) -> int:
    """Return the start of the longest suffix of `text` that is a prefix of `marker`."""
    for length in range(min(len(marker) - 1, len(text) - at), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)


NAME_KEYS = frozenset({"name", "function", "tool_name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
OTHER_KEYS = frozenset({"type", "id", "tool_call_id"})

MAX_UNCERTAIN = 16 * 1024  # A candidate that is still not known to be a call after this many characters is content


def call_object(cursor: Cursor, output: CallCollector, tools: Tools, *, needs_arguments: bool) -> Reading[bool]:
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
            output.call(name, arguments)
            cursor.let_go()
            reported = True

    if not (yield from cursor.takes("{")):
        return False
    while True:
        yield from cursor.skip()
        key = yield from string(cursor, None if reported else limit)
        yield from cursor.skip()
        if not (yield from cursor.takes(":")):
            return reported
        yield from cursor.skip()
        if key in NAME_KEYS and name is None:
            name = yield from string(cursor, limit)
            if name not in tools:
                return False
            if early is not None:
                report(early)
        elif key in ARGUMENT_KEYS and not reported and early is None:
            if name is not None and (yield from cursor.peek()) == "{":
                report("")
                if not (yield from brackets(cursor, output.arguments)):
                    return True
                output.is_whole = True
            else:
                early = yield from _arguments(cursor, limit)
                if early is None:
                    return False
                if name is not None:
                    report(early)
        elif key not in OTHER_KEYS or (yield from string(cursor, None if reported else limit)) is None:
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
        text = yield from string(cursor, limit)
        return text if text is not None and text.lstrip().startswith("{") else None
    return "{}" if (yield from cursor.takes("null")) else None


def string(cursor: Cursor, limit: int | None) -> Reading[str | None]:
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


def hermes(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number, anywhere."""
    while (yield from content_until(cursor, output, (OPEN,))):
        cursor.keep()
        cursor.at += len(OPEN)
        yield from cursor.skip()
        if (yield from call_object(cursor, output, tools, needs_arguments=False)):
            yield from cursor.skip()
            yield from cursor.takes(CLOSE)
        else:
            no_call(cursor, output, OPEN)


def llama3_json(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """`{"name": "f", "parameters": {...}}` at a line start or after <|python_tag|>; more calls after `;` or `,`."""
    begins = True  # only white space precedes it in its line
    while char := (yield from cursor.peek()):
        cursor.keep()
        if (begins and char == "{") or (char == "<" and (yield from cursor.takes(PYTHON_TAG))):
            yield from cursor.skip()
            begins = False
            if not (yield from call_object(cursor, output, tools, needs_arguments=True)):
                no_call(cursor, output, "{" if char == "{" else PYTHON_TAG)
                continue
            found = True
            while found:
                cursor.keep()
                yield from cursor.skip()
                if not (yield from cursor.takes(";")):
                    yield from cursor.takes(",")
                yield from cursor.skip()
                found = yield from call_object(cursor, output, tools, needs_arguments=True)
            cursor.back()
        else:
            cursor.let_go()
            cursor.at += 1
            output.content(char)
            begins = char == "\n" or (begins and char in " \t")


def mistral(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """`[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]`, or `[TOOL_CALLS]f[ARGS]{...}` for each call."""
    while (yield from content_until(cursor, output, (TOOL_CALLS,))):
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
            no_call(cursor, output, TOOL_CALLS)
        elif listed:
            yield from rest_of_list(cursor, output, tools)


def rest_of_list(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
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


def _named_call(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[bool]:
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
    output.is_whole = yield from brackets(cursor, output.arguments)
    return True


def pythonic(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """`[f(a=1, b="x"), g()]` at the start of the text, alone or between <|python_start|> and <|python_end|>."""
    cursor.keep()
    yield from cursor.skip()
    yield from cursor.takes(PYTHON_START)
    yield from cursor.skip()
    num_before = output.num_calls
    if (yield from cursor.takes("[")):
        yield from python_calls(cursor, output, tools)
    if output.num_calls == num_before:
        cursor.back()
    while (yield from cursor.peek()):
        output.content(cursor.text[cursor.at :])
        cursor.at = len(cursor.text)


def python_calls(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """Parse `f(a=1), g()]`; the cursor returns to the start of anything that is not a call."""
    while True:
        if not (yield from python_call(cursor, output, tools)):
            return cursor.back()
        yield from cursor.skip()
        if (yield from cursor.takes("]")):
            yield from cursor.skip()
            yield from cursor.takes(PYTHON_END)
            return
        cursor.keep()
        if not (yield from cursor.takes(",")):
            return cursor.let_go()


def python_call(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[bool]:
    """Parse `f(a=1)`. Returns False if it is no call; the caller then returns to the mark."""
    yield from cursor.skip()
    name = yield from cursor.run(_in_name, 64)
    parts = yield from _parentheses(cursor)
    arguments = None if name not in tools or parts is None else _keywords(parts)
    if arguments is None:
        return False
    cursor.let_go()
    output.call(name, whole_characters(json.dumps(arguments, ensure_ascii=False)))
    return True


def _parentheses(cursor: Cursor) -> Reading[list[str] | None]:
    """Read `(...)` by Python's rules: brackets in strings do not count. Returns what stands between its commas; None
    if it is not closed."""
    parts, depth, quote, escaped = [""], 0, "", False
    if not (yield from cursor.takes("(")):
        return None
    start = cursor.at
    while cursor.at - start < MAX_UNCERTAIN and (char := (yield from cursor.peek())):
        cursor.at += 1
        if not quote and depth == 0 and char in ",)":
            if char == ")":
                return parts
            parts.append("")
            continue
        parts[-1] += char
        if quote:
            quote = "" if char == quote and not escaped else quote
            escaped = not escaped and char == "\\"
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
    return None


class _Literals(ast.NodeTransformer):
    """Replaces JSON's true, false and null by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        values = {"true": True, "false": False, "null": None}
        return ast.copy_location(ast.Constant(values[node.id]), node) if node.id in values else node


def _keywords(parts: list[str]) -> Mapping[str, Any] | None:
    """Return the arguments `key=value`, or None unless all values are literals that JSON can represent.

    A key may be a word that Python reserves, as `from`, or no identifier, as `x-y`: tools have such arguments.
    """
    if not parts[-1].strip():
        parts = parts[:-1]
    values: dict[str, Any] = {}
    try:
        for part in parts:
            key, sign, written = part.partition("=")
            if not sign or not key.strip() or set(key) & set("\"'()[]{}"):
                return None
            values[key.strip()] = ast.literal_eval(_Literals().visit(ast.parse(written.strip(), mode="eval")))
        json.dumps(values, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return values


def _in_name(char: str) -> bool:
    return char.isascii() and (char.isalnum() or char in "_-.")


def no_call(cursor: Cursor, output: CallCollector, word: str) -> None:
    """Report `word`, which starts at the mark and does not begin a call, as content, and continue after it."""
    cursor.back()
    cursor.at += len(word)
    output.content(word)


TEXT_KEYWORDS = ("pattern", "format", "minLength", "maxLength")
"""What a JSON schema can ask of a string."""


@dataclass(frozen=True)
class ParameterLayout:
    """How one argument is generated where arguments are no JSON: `before_key KEY behind_key VALUE behind_value`."""

    before_key: str
    behind_key: str
    behind_value: str
    behind_json_key: str = ""  # in place of `behind_key` where the value is JSON
    behind_json_value: str = ""  # in place of `behind_value` there

    def head(self, key: str, value: Any) -> str:
        """Return what stands before the value of an argument with this schema."""
        return self.before_key + key + ((is_json(value) and self.behind_json_key) or self.behind_key)

    def end(self, value: Any) -> str:
        """Return what stands behind the value of an argument with this schema."""
        return (is_json(value) and self.behind_json_value) or self.behind_value

    def left_open(self, schema: Mapping[str, Any]) -> list[str]:
        """Return the keywords of a schema that the grammar of such arguments does not enforce."""
        properties = schema.get("properties")
        texts = [one for one in properties.values() if not is_json(one)] if isinstance(properties, Mapping) else []
        found = [key for key in TEXT_KEYWORDS if any(isinstance(one, Mapping) and key in one for one in texts)]
        return found + [key for key in _OF_WHOLE_OBJECTS if key in schema]


_OF_WHOLE_OBJECTS = ("anyOf", "oneOf", "allOf", "patternProperties", "minProperties", "maxProperties")


class ArgumentNotation(Protocol):
    """Grammars of arguments in another notation than JSON."""

    def rules(self, index: int, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
        """Return the rules of `arguments_{index}`: the arguments of the call of this number, by their schema."""

    def left_open(self, schema: Mapping[str, Any]) -> list[str]:
        """Return the keywords of a schema that these rules do not enforce."""

    @property
    def json_heads(self) -> tuple[str, ...]:
        """What stands before values that are JSON."""


@dataclass(frozen=True)
class ToolCallLayout:
    """How a required call is generated: `trigger opening CALL between CALL closing`."""

    before_name: str
    before_arguments: str
    behind_arguments: str
    trigger: str = ""  # only calls begin with it; "": the start of a call itself
    opening: str = ""
    between: str = ""
    closing: str = ""
    alone: bool = False  # no grammar allows both it and other text
    parameter: ParameterLayout | None = None
    notation: ArgumentNotation | None = None  # with neither this nor `parameter`, the arguments are JSON
    begins: str = ""  # without a trigger: a regular expression of texts that the parser takes for calls
    behind_number: str = ""  # stands behind the number of the call, which `before_arguments` then ends before
    behind_answer: str = ""  # what ends an answer, which calls follow: it stands before `trigger`


Schemas = Mapping[str, Mapping[str, Any]]  # JSON schemas of the arguments, by name of tool

_SPACED = {"x-guidance": {**AS_ANY_OF, "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
CALL_KEYS = "|".join(sorted(NAME_KEYS | OTHER_KEYS | ARGUMENT_KEYS))


def calls_only(layout: ToolCallLayout, tools: Schemas, special: SpecialTokens, *, many: bool) -> str:
    """Return a grammar for exactly one call (`many`: one or more)."""
    rules = _rules(layout, tools, special, many=many)
    return "\n".join(["start: " + joined(terminal(layout.behind_answer + layout.trigger, special), "calls"), *rules])


def calls_or(
    answer: Mapping[str, Any] | None, layout: ToolCallLayout, tools: Schemas, special: SpecialTokens, *, many: bool
) -> str:
    """Return a grammar for any text followed by calls, or for an answer without calls (`answer`: its JSON schema)."""
    rules = _rules(layout, tools, special, many=many)
    trigger, closed = layout.trigger, layout.behind_answer
    may_close = f"({terminal(closed, special)})?" if closed else ""
    before = closed + trigger
    if answer is not None:
        calls = joined(terminal(before, special), "calls")
        start = f"start: {joined('answer', may_close)} | {calls}\nanswer: {json_rule(answer)}"
    elif not trigger:
        start = f"start: PLAIN | calls\nPLAIN: /(?s:.*)/ & ~/{layout.begins}/"
    else:
        marker = pattern_of(trigger)
        plain = f"PLAIN: /(?s:.*)/ & ~/(?s:.*){marker}(?s:.*)/"  # excludes the letters of a special token too
        is_letters = next(special.parts(trigger))[1] is None
        letters = f"head[lazy]: /(?s:.*){pattern_of(before)}/"
        head = letters if is_letters else f"head: PLAIN {terminal(before, special)}"
        start = f"start: {joined('PLAIN', may_close)} | head calls\n{plain}\n{head}"
    return "\n".join([start, *rules])


def _rules(layout: ToolCallLayout, tools: Schemas, special: SpecialTokens, *, many: bool) -> list[str]:
    written = {name: terminal(text, special) for name, text in vars(layout).items() if isinstance(text, str)}
    more = f"({joined(written['between'], 'call')})*" if many else ""
    opens = layout.opening if not layout.trigger else ""
    if opens:  # one text with the head of the first call, so that no other text can be meant by its beginning
        rules = ["calls: " + joined("first", more, written["closing"])]
        rules.append("first: " + " | ".join(f"first_{index}" for index in range(len(tools))))
    else:
        rules = ["calls: " + joined(written["opening"], "call", more, written["closing"])]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, (name, schema) in enumerate(tools.items()):
        head, rest = layout.before_name + name + layout.before_arguments, f"arguments_{index}"
        for rule, text in (("call", head), ("first", opens + head)):
            if rule == "call" or opens:
                number = joined("NUMBER", written["behind_number"]) if layout.behind_number else ""
                body = joined(terminal(text, special), number, rest, written["behind_arguments"])
                rules.append(f"{rule}_{index}: {body}")
        if layout.notation is not None:
            rules += layout.notation.rules(index, schema, special)
        elif layout.parameter is None:
            rules.append(f"arguments_{index}: {json_rule(schema)}")
        else:
            rules += _parameters(layout.parameter, index, schema, special)
    if layout.behind_number:
        rules.append("NUMBER: /[1-9][0-9]?/")
    if layout.parameter is not None:
        rules += [*text_until("text_value", layout.parameter.behind_value, special), "KEY: /[A-Za-z0-9_-]{1,64}/"]
    return rules


def text_until(name: str, end: str, special: SpecialTokens) -> list[str]:
    """Return the rules of `name`: any text, and what ends it."""
    pieces = list(special.parts(end))
    place = next((place for place, (_, id_) in enumerate(pieces) if id_ is not None), None)
    if place is None:
        return [f"{name}[lazy]: /(?s:.*){pattern_of(end)}/"]
    parts, text = [part for part, _ in pieces], f"TEXT_{name}".upper()
    marker = pattern_of(parts[place])  # in letters it would be read as the end, too
    return [
        f"{name}: {text} {terminal(''.join(parts[place:]), special)}",
        f"{text}: /(?s:.*){pattern_of(''.join(parts[:place]))}/ & ~/(?s:.*){marker}(?s:.*)/",
    ]


def _parameters(layout: ParameterLayout, index: int, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
    """Return the rules of a call's arguments in the order of the schema; optional ones may be left out."""
    properties = schema.get("properties")
    required = schema.get("required")
    known = properties if isinstance(properties, Mapping) else {}
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    order = dict.fromkeys([*known, *names])
    rules, parts = [], []
    for place, key in enumerate(order):
        value = known.get(key)
        parts.append(f"parameter_{index}_{place}" + ("" if key in names else "?"))
        head = terminal(layout.head(key, value), special)
        end = terminal(layout.end(value), special)
        rules.append(f"parameter_{index}_{place}: {head} {_value(value, schema, end)}")
    if not known:
        key = joined(terminal(layout.before_key, special), "KEY", terminal(layout.behind_key, special))
        rules.append(f"any_{index}: {key} text_value")
        parts.append(f"any_{index}*")
    return [f"arguments_{index}: " + joined(*parts), *rules]


def _value(value: Any, schema: Mapping[str, Any], end: str) -> str:
    """Return the rule of one argument's value and what ends it."""
    if choices := _choices(value):
        return f"({' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)}) {end}"
    if not isinstance(value, Mapping) or not is_json(value):
        return "text_value"
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return f"{json_rule({**shared, **value})} {end}"


def _choices(value: Any) -> list[str]:
    """Return the texts that an argument is one of; none if it can be another."""
    choices = value.get("enum") if isinstance(value, Mapping) else None
    is_texts = isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
    return choices if isinstance(choices, list) and is_texts else []


def is_json(value: Any) -> bool:
    """Return whether an argument of this schema is written as JSON, where others are written as they are."""
    if not isinstance(value, Mapping) or _choices(value):
        return False
    return value.get("type", "string") != "string" or bool(value.keys() & {"anyOf", "oneOf", "allOf", "$ref", "const"})


def pattern_of(text: str) -> str:
    """Return a text as a regular expression between slashes."""
    return re.sub(r"([][(){}.*+?^$|/\\])", r"\\\1", text).replace("\n", r"\n")


def json_rule(schema: Mapping[str, Any]) -> str:
    return "%json " + written_numbers.dumps(dict(schema) | _SPACED)


def terminal(text: str, special: SpecialTokens) -> str:
    """Return a text in Lark syntax. Special tokens are given by id, because no characters produce them."""
    return " ".join(json.dumps(part) if id_ is None else f"<[{id_}]>" for part, id_ in special.parts(text))


def joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
