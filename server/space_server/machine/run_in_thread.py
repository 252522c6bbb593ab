"""Work in a thread that ends with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOOK = 0.5
"""Seconds after which the waiting thread looks for signals: one that comes just before it sleeps does not wake it."""


def run_in_thread(work: Callable[[], T]) -> T:
    """What `work` returns or raises, done in a thread of its own.

    A thread that has computed on several cores keeps the helpers it did so with for as long as it lives. Where threads
    and helpers together are more than the cores, OpenMP lets helpers sleep between two products instead of waiting
    awake, and each product has to wake them: seen on 2 cores with a model of 125M, steps of a prompt took 2.5 times as
    long in the stepping thread while the main thread, which had loaded the model, still had a helper.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    # A daemon: a signal that ends the process while the model loads does not wait for it.
    thread = threading.Thread(target=run, name="passing", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LOOK)
    if errors:
        raise errors[0]
    return results[0]
