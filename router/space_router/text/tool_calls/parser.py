"""Incremental parser for tool calls in streamed text.

A reader splits text into content and calls. Its output is final: a call is given out once its name matches a tool and
its arguments have begun, content once it cannot become a call. Text that only resembles a call is content. White space
next to a call is content only between two pieces of content.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

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
class ParsedText:
    """Parsed output: content and pieces of calls, in order."""

    parts: tuple[str | CallPiece, ...]

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
        self._parts: list[str | CallPiece] = []
        self.num_calls = 0
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

    def call(self, name: str) -> None:
        """Begin a call."""
        self._behind_call, self._space_behind = True, ""
        self._parts.append(CallPiece(self.num_calls, name, ""))
        self.num_calls += 1
        self.is_whole = False

    def arguments(self, text: str) -> None:
        """Add to the latest call's arguments."""
        last = self._parts[-1] if self._parts else None
        if isinstance(last, CallPiece):
            self._parts[-1] = replace(last, arguments=last.arguments + text)
        elif text:
            self._parts.append(CallPiece(self.num_calls - 1, None, text))

    def whole(self) -> None:
        """Mark the latest call's arguments as complete."""
        self.is_whole = True

    def take(self, *, ended: bool) -> ParsedText:
        """Return the output since the last call. `ended`: the text is complete."""
        if ended and not self._behind_call and self._space:
            self._parts.append(self._space)
        parsed = ParsedText(tuple(self._parts))
        self._parts = []
        return parsed


Form: TypeAlias = Callable[[Cursor, CallCollector, frozenset[str]], Reading[None]]
"""Parser of one model family's format: reads the cursor to its end and reports to the collector."""


class ToolCallReader:
    """Splits one streamed text into content and calls of known tools."""

    def __init__(self, form: Form, tools: frozenset[str]) -> None:
        self._cursor = Cursor()
        self._output = CallCollector()
        self._reading: Iterator[None] = form(self._cursor, self._output, tools)

    @property
    def num_calls(self) -> int:
        """Number of calls begun so far."""
        return self._output.num_calls

    @property
    def is_whole(self) -> bool:
        """Whether the arguments of every call so far are complete."""
        return self._output.is_whole

    def push(self, text: str, *, ended: bool = False) -> ParsedText:
        """Read text; return the output that is now certain. `ended`: the text is complete."""
        self._cursor.add(text)
        self._cursor.ended = ended
        next(self._reading, None)
        return self._output.take(ended=ended)


def content_until(cursor: Cursor, output: CallCollector, marker: str) -> Reading[bool]:
    """Report the text before `marker` as content. Returns True at the marker, False at the end of the text."""
    while True:
        place = cursor.text.find(marker, cursor.at)
        if place < 0:
            place = len(cursor.text) if cursor.ended else _start_of(marker, cursor.text, cursor.at)
        output.content(cursor.text[cursor.at : place])
        cursor.at = place
        if cursor.text.startswith(marker, place):
            return True
        if cursor.ended:
            return False
        yield


def _start_of(marker: str, text: str, at: int) -> int:
    """Return the start of the longest suffix of `text` that is a prefix of `marker`."""
    for length in range(min(len(marker) - 1, len(text) - at), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)
