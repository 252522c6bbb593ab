"""A run that is told to stop ends behind the update it is in; told twice, at once."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from space_train.run_folder import kept_updates

SAME = 1.0
"""Seconds within which a further signal is the first: a launcher passes a terminal's on to processes that have it."""
STDERR = 2


class Interrupted(RuntimeError):
    """The run was told to stop; it can be resumed."""


@contextlib.contextmanager
def interruptions(*, says: bool, clock: Callable[[], float] = time.monotonic) -> Iterator[list[int]]:
    """A list that holds the signal once SIGINT or SIGTERM came: the run ends behind the update it is in, and where it
    `says` so, at once. Another one, later than SAME, raises KeyboardInterrupt."""
    received: list[int] = []
    first = 0.0

    def note(number: int, _: object) -> None:
        nonlocal first
        if received and clock() - first > SAME:
            raise KeyboardInterrupt
        if not received:
            received.append(number)
            first = clock()
            if says:  # past sys.stderr, in whose midst the signal may have come
                os.write(STDERR, b"\nspaceserve train: ends behind this update; once more to stop at once\n")

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


def stopped_at_once(out: Path) -> str:
    """What a run that was stopped outside of an update leaves in `out`."""
    updates = kept_updates(out)
    if updates is None:
        return "Stopped before an update was saved."
    return f"Stopped. {out} keeps the run up to update {updates}: {GO_ON}."


GO_ON = "the same command, without --restart, goes on from there"
