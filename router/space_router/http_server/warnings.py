"""Warnings of a request: what was taken and not heeded, named in the `Warning` header of its response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

MOST_WARNINGS = 8  # of one response; further ones are counted
MOST_CHARACTERS = 300  # of one warning

_current: ContextVar[list[str] | None] = ContextVar("warnings", default=None)


def warn(text: str) -> None:
    """Add a sentence to the warnings of the request that is being handled; once, however often it is given."""
    texts = _current.get()
    if texts is not None and text not in texts:
        texts.append(text)


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect, in the block and in what it starts, what `warn` is called with."""
    texts: list[str] = []
    token = _current.set(texts)
    try:
        yield texts
    finally:
        _current.reset(token)


def warning_headers(texts: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """Return a header `Warning: 299 spaceserve "…"` (RFC 7234, 5.5) for each warning."""
    more = len(texts) - MOST_WARNINGS
    named = [*texts[:MOST_WARNINGS], *([f"There are {more} further warnings."] if more > 0 else [])]
    return [(b"warning", b'299 spaceserve "' + _quoted(text) + b'"') for text in named]


def _quoted(text: str) -> bytes:
    """Return the inside of a quoted string: printable ASCII; other characters are escaped as Python does."""
    short = text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"
    plain = short.encode("ascii", "backslashreplace").decode("ascii")
    return (
        "".join(one if one.isprintable() else " " for one in plain).replace("\\", "\\\\").replace('"', '\\"').encode()
    )
