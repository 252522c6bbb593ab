"""Runs work in a temporary thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOOK = 0.5
"""Interval at which the waiting thread checks for signals: one that arrives just before it sleeps does not wake it."""


def run_in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own; return its result or raise its exception.

    A thread that computed on several cores keeps its OpenMP helpers for life. If threads and helpers outnumber the
    cores, OpenMP lets helpers sleep between two matmuls, and each matmul has to wake them: seen on 2 cores with a model
    of 125M, prompt steps took 2.5 times as long in the stepping thread while the main thread, which had loaded the
    model, still had a helper.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    # A daemon thread, so that a signal during loading ends the process at once.
    thread = threading.Thread(target=run, name="passing", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LOOK)
    if errors:
        raise errors[0]
    return results[0]
