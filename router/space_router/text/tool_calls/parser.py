"""Calls of tools in a model's text, found whatever the pieces it comes in.

A reader splits a text into content and calls. What it gives out is final: a call once its name is known to be one of
the tools and its arguments have begun, content once it can be no call. What only looks like a call is content. White
space next to a call is content only where it stands between two pieces of it.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""Reads on where it left off; yields where it needs more text."""


@dataclass(frozen=True)
class CallPiece:
    """More of one call: its name comes with its first piece, its arguments are JSON as the model wrote it."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class Said:
    """What became certain: content and pieces of calls, in their order."""

    parts: tuple[str | CallPiece, ...]

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> tuple[CallPiece, ...]:
        return tuple(part for part in self.parts if isinstance(part, CallPiece))


class Cursor:
    """The text so far, and how far it has been read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._kept: int | None = None  # from where on the text may be read again

    def add(self, text: str) -> None:
        """More text. Places in it stay what they are while it is kept."""
        if self._kept is None:
            self.text, self.at = self.text[self.at :], 0
        self.text += text

    def keep(self) -> None:
        """What comes now may be read again."""
        self._kept = self.at

    def let_go(self) -> None:
        """It will not."""
        self._kept = None

    def back(self) -> None:
        """Read it again."""
        if self._kept is not None:
            self.at, self._kept = self._kept, None

    def peek(self) -> Reading[str]:
        """The next character, which stays; "" at the end of the text."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def takes(self, word: str) -> Reading[bool]:
        """Whether a word comes next; if so it is behind us."""
        while True:
            there = self.text[self.at : self.at + len(word)]
            if there == word:
                self.at += len(word)
                return True
            if self.ended or not word.startswith(there):
                return False
            yield

    def skip(self, characters: str = " \t\r\n") -> Reading[None]:
        """Behind all of these characters that come next."""
        while (char := (yield from self.peek())) and char in characters:
            self.at += 1

    def run(self, holds: Callable[[str], bool], most: int) -> Reading[str]:
        """As many of the next characters as there are of a kind, `most` at most."""
        found = ""
        while len(found) < most and (char := (yield from self.peek())) and holds(char):
            self.at += 1
            found += char
        return found


class Telling:
    """Collects what is certain until it is asked for."""

    def __init__(self) -> None:
        self._space = ""  # white space behind the latest content: it goes if nothing but calls follow
        self._space_behind = ""  # white space behind the latest call
        self._spoken = False  # there was content
        self._behind_call = False
        self._parts: list[str | CallPiece] = []
        self.num_calls = 0
        self.is_whole = True  # the latest call has all of its arguments

    def content(self, text: str) -> None:
        """Characters that belong to no call."""
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
        """A call has begun."""
        self._behind_call, self._space_behind = True, ""
        self._parts.append(CallPiece(self.num_calls, name, ""))
        self.num_calls += 1
        self.is_whole = False

    def arguments(self, text: str) -> None:
        """More of the latest call's arguments."""
        last = self._parts[-1] if self._parts else None
        if isinstance(last, CallPiece):
            self._parts[-1] = replace(last, arguments=last.arguments + text)
        elif text:
            self._parts.append(CallPiece(self.num_calls - 1, None, text))

    def whole(self) -> None:
        """No more of them."""
        self.is_whole = True

    def taken(self, *, ended: bool) -> Said:
        """What came since the last time."""
        if ended and not self._behind_call and self._space:
            self._parts.append(self._space)
        said = Said(tuple(self._parts))
        self._parts = []
        return said


Form: TypeAlias = Callable[[Cursor, Telling, frozenset[str]], Reading[None]]
"""How one family of models writes calls: reads a text to its end and tells what it finds; the names are the tools'."""


class ToolCallReader:
    """One text, split into content and calls of known tools as it comes."""

    def __init__(self, form: Form, tools: frozenset[str]) -> None:
        self._cursor = Cursor()
        self._telling = Telling()
        self._reading: Iterator[None] = form(self._cursor, self._telling, tools)

    @property
    def num_calls(self) -> int:
        """Calls that have begun so far."""
        return self._telling.num_calls

    @property
    def is_whole(self) -> bool:
        """No call so far lacks the end of its arguments."""
        return self._telling.is_whole

    def push(self, text: str, *, ended: bool = False) -> Said:
        """What these characters make certain. `ended`: nothing comes after them."""
        self._cursor.add(text)
        self._cursor.ended = ended
        next(self._reading, None)
        return self._telling.taken(ended=ended)


def content_until(cursor: Cursor, telling: Telling, marker: str) -> Reading[bool]:
    """Everything before a marker is content. The cursor stands on it: True; or at the end of the text: False."""
    while True:
        place = cursor.text.find(marker, cursor.at)
        if place < 0:
            place = len(cursor.text) if cursor.ended else _start_of(marker, cursor.text, cursor.at)
        telling.content(cursor.text[cursor.at : place])
        cursor.at = place
        if cursor.text.startswith(marker, place):
            return True
        if cursor.ended:
            return False
        yield


def _start_of(marker: str, text: str, at: int) -> int:
    """Where the longest beginning of a marker that the text ends with begins."""
    for length in range(min(len(marker) - 1, len(text) - at), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)
