"""Signal handling: a first SIGINT or SIGTERM ends the run after the current update, a second one at once."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from space_train.run_folder import kept_updates

SAME = 1.0
"""Seconds within which a repeated signal counts as the same one, because launchers forward a terminal's signal."""
STDERR = 2


class Interrupted(RuntimeError):
    """The run was stopped by a signal; it can be resumed."""


@contextlib.contextmanager
def interruptions(*, says: bool, clock: Callable[[], float] = time.monotonic) -> Iterator[list[int]]:
    """Yield a list that receives the signal number on SIGINT or SIGTERM; the run then ends after the current update.
    `says`: print a note at once. Another signal more than SAME seconds later raises KeyboardInterrupt."""
    received: list[int] = []
    first = 0.0

    def note(number: int, _: object) -> None:
        nonlocal first
        if received and clock() - first > SAME:
            raise KeyboardInterrupt
        if not received:
            received.append(number)
            first = clock()
            if says:  # not through sys.stderr, which the signal may have interrupted
                os.write(STDERR, b"\nspaceserve train: ends behind this update; once more to stop at once\n")

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # only the main thread can set signal handlers
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stopped_at_once(out: Path) -> str:
    """Describe the files in `out` of a run that was stopped outside of an update."""
    updates = kept_updates(out)
    if updates is None:
        return "Stopped before an update was saved."
    return f"Stopped. {out} keeps the run up to update {updates}: {GO_ON}."


GO_ON = "the same command, without --restart, goes on from there"
