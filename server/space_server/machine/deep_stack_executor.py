"""A thread pool with deep stacks, for tasks that recurse."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

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
