"""Numbers of JSON that are written again exactly as they were read."""

import json
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import orjson


class WrittenNumber(float):
    """A number that Python would write in another way than it was written, such as `1e400` or `1.50`.

    As a text it is what was written. `dumps` writes it so, too; `json.dumps` does not.
    """

    written: str

    @classmethod
    def parsed(cls, written: str) -> "int | float":
        """Return a number of JSON: a plain one if Python writes it in the same way."""
        try:
            plain: int | float = float(written) if set(written) & set(".eE") else int(written)
            if repr(plain) == written:
                return plain
        except ValueError:  # more digits than Python converts
            pass
        return cls._as_written(written)

    @classmethod
    def integer(cls, written: str) -> "int | float":
        """Return an integer of JSON: a plain one if it has 64 bits at most, as all readers take it."""
        if len(written) <= _MOST_DIGITS and -(2**63) <= (plain := int(written)) < 2**64:
            return plain
        return cls._as_written(written)

    @classmethod
    def _as_written(cls, written: str) -> "WrittenNumber":
        number = cls(written)
        number.written = written
        return number

    def __repr__(self) -> str:
        return self.written

    __str__ = __repr__


_MOST_DIGITS = 20  # of an integer of 64 bits, its sign included


_LARGE_INTEGER = re.compile(rb"[0-9][0-9]{18}")  # or digits in a text; twice as fast as [0-9]{19}


MAX_CONTAINERS = 100_000
"""Most lists and objects of a text. A million would hold all threads of the interpreter for a second or more."""

_STRING_OR_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)|[\[{]++', re.DOTALL)


class TooManyContainers(orjson.JSONDecodeError):
    """A text of JSON has more lists and objects than MAX_CONTAINERS."""

    def __init__(self) -> None:
        super().__init__(f"it has more than {MAX_CONTAINERS} lists and objects", "", 0)


def loads(content: str | bytes) -> Any:
    """Parse JSON; integers of more than 64 bits are WrittenNumbers, so that none is rounded on its way.

    Raises orjson.JSONDecodeError, also for infinities such as `1e400`, and TooManyContainers.
    """
    written = content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
    if written.count(b"[") + written.count(b"{") > MAX_CONTAINERS:
        _check_containers(written)
    value = orjson.loads(content)
    if _LARGE_INTEGER.search(written):
        with suppress(RecursionError):  # nested deeper than a request may be
            return json.loads(content, parse_int=WrittenNumber.integer)
    return value


def _check_containers(written: bytes) -> None:
    """Count the opening brackets outside of strings. Other threads run meanwhile. Raises TooManyContainers."""
    number = 0
    for found in _STRING_OR_BRACKETS.finditer(written):
        if not found[0].startswith(b'"'):
            number += len(found[0])
            if number > MAX_CONTAINERS:
                raise TooManyContainers


def as_bytes(value: Any) -> bytes:
    """Return a value as JSON, each WrittenNumber as it was written. Faster than `dumps`, and takes no larger integers
    than those of 64 bits."""
    return orjson.dumps(value, default=_fragment)


def _fragment(value: Any) -> orjson.Fragment:
    if isinstance(value, WrittenNumber):
        return orjson.Fragment(value.written)
    raise TypeError(f"{type(value).__qualname__} is no JSON")


def dumps(value: Any, **options: Any) -> str:
    """Return `json.dumps(value, **options)` with each WrittenNumber as it was written."""
    mark = f"number {secrets.token_hex(16)} "  # cannot be guessed, so that no text of a client looks like it
    marked, has_numbers = _marked(value, mark)
    text = json.dumps(marked if has_numbers else value, **options)
    return re.sub(f'"{mark}([^"]*)"', r"\1", text) if has_numbers else text


def _marked(value: Any, mark: str) -> tuple[Any, bool]:
    """Return the value with marked texts for its WrittenNumbers, and whether it has any."""
    if isinstance(value, WrittenNumber):
        return mark + value.written, True
    if isinstance(value, Mapping):
        pairs = [(key, _marked(one, mark)) for key, one in value.items()]
        return {key: one for key, (one, _) in pairs}, any(has for _, (_, has) in pairs)
    if isinstance(value, list | tuple):
        found = [_marked(one, mark) for one in value]
        return [one for one, _ in found], any(has for _, has in found)
    return value, False
