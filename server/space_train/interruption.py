"""A run that is told to stop ends behind the update it is in."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


class Interrupted(RuntimeError):
    """The run was told to stop; it can be resumed."""


@contextlib.contextmanager
def interruptions() -> Iterator[list[int]]:
    """A list that holds the signal once SIGINT or SIGTERM came: the run ends behind the update it is in."""
    received: list[int] = []

    def note(number: int, _: object) -> None:
        received.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are its own
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
