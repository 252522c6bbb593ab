"""Threads of a worker: with deep stacks for tasks that recurse, and for work that is done once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

STACK_BYTES = 64 * 1024**2
"""Stack of each thread: the grammar library recurses as deep as rules refer to rules."""

_starting = threading.Lock()  # the stack size is process-wide while a thread starts


class DeepStackExecutor:
    """Runs tasks in order, a few at once. Idle threads end; all are daemons."""

    def __init__(self, name: str, most: int) -> None:
        """`most`: threads at the same time."""
        self._name, self._most = name, most
        self._tasks: deque[Callable[[], None]] = deque()
        self._num_threads = 0
        self._lock = threading.Lock()  # of both

    def take(self, task: Callable[[], None]) -> None:
        """Queue a task, which must not raise. Raises RuntimeError if no thread runs and none can be started."""
        with self._lock:
            self._tasks.append(task)
            if self._num_threads < self._most:
                try:
                    self._start()
                except RuntimeError:
                    if not self._num_threads:
                        self._tasks.remove(task)
                        raise

    def _start(self) -> None:
        with _starting:
            usual = threading.stack_size(STACK_BYTES)
            try:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._num_threads += 1
            finally:
                threading.stack_size(usual)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._num_threads -= 1
                    return
                task = self._tasks.popleft()
            task()


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
