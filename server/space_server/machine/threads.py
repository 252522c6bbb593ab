"""The processors and threads of a worker: how many threads a matmul takes, how threads wait, and deep stacks."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

ROUTERS_FROM = 4
"""From so many cores on, one is left to the router: memory bandwidth does not need it, and a matmul thread displaced by
the router delays all others."""


def num_cores(
    *,
    processors: Path = Path("/sys/devices/system/cpu"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    process: Path = Path("/proc/self"),
    allowed: set[int] | None = None,
) -> int:
    """Return the physical cores among the processors that this process may run on, bounded by the container's CPU
    quota.

    Two hardware threads of a core share its multiply units, so a second one adds nothing. `allowed`: None asks the
    system.
    """
    if allowed is None:
        allowed = _allowed()
    cores = {_siblings(processors, number) for number in allowed}
    return max(1, min([len(cores), *(int(quota) for quota in _quotas(cgroup, process / "cgroup"))]))


def num_threads(cores: int, *, beside_router: bool, num_workers: int = 1, environment: Mapping[str, str]) -> int:
    """Return the threads of a matmul of one of `num_workers` that share these cores; OMP_NUM_THREADS overrides it."""
    given = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    if given.isdecimal() and int(given):
        return int(given)
    left = cores - 1 if beside_router and cores >= ROUTERS_FROM else cores
    return max(1, left // num_workers)


def keep_off_last(num_workers: int) -> int | None:
    """Leave the last allowed processor to the router: bind all threads of this process to the others. Returns its
    number, or None where each of `num_workers` needs one.

    Seen with the embedded model on two processors: 1.14 times as many tokens per second at 1 and 8 streams, 1.05 times
    at 32, and less spread; binding the router instead brought nothing at 1 stream and 1.03 times at 8 and 32.
    """
    allowed = sorted(_allowed())
    if num_workers >= len(allowed) or not hasattr(os, "sched_setaffinity"):
        return None
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # a thread that has ended meanwhile
            os.sched_setaffinity(int(task.name), allowed[:-1])
    return allowed[-1]


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _siblings(processors: Path, number: int) -> str:
    """Return a key shared by all hardware threads of one core; the processor itself if the system does not say."""
    try:
        return (processors / f"cpu{number}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(number)


def _quotas(root: Path, own: Path) -> Iterator[float]:
    """Return the CPU quota, in processors, of each control group (v1 or v2) of this process."""
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:
        lines = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if not controllers:
            for folder in _upwards(root, path):
                quota, _, period = _words(folder / "cpu.max").partition(" ")
                yield from _ratio(quota, period)
        elif "cpu" in controllers.split(","):
            for folder in _upwards(root / "cpu", path):
                yield from _ratio(_words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us"))


def _upwards(root: Path, path: str) -> Iterator[Path]:
    here = root / path.strip("/")
    yield here
    while here != root:
        here = here.parent
        yield here


def _words(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _ratio(quota: str, period: str) -> Iterator[float]:
    if quota.isdecimal() and period.isdecimal() and int(period):  # else `max` or -1: no bound
        yield max(1.0, int(quota) / int(period))


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
