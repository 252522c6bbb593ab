"""How many threads a product gets: the cores that this process may use, whoever bounds them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

ROUTERS_FROM = 4
"""Cores from which on one is left to the router: memory is read as fast by one thread fewer, and threads that wait for
one which the router displaced lose more than it brought."""


def num_cores(
    *,
    processors: Path = Path("/sys/devices/system/cpu"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    process: Path = Path("/proc/self"),
    allowed: set[int] | None = None,
) -> int:
    """Physical cores among the processors that this process may run on, as far as a container's quota goes.

    Two hardware threads of a core share what multiplies: a second one brings nothing. `allowed`: None asks the system.
    """
    if allowed is None:
        allowed = _allowed()
    cores = {_siblings(processors, number) for number in allowed}
    return max(1, min([len(cores), *(int(quota) for quota in _quotas(cgroup, process / "cgroup"))]))


def num_threads(cores: int, *, beside_router: bool, num_workers: int = 1, environment: Mapping[str, str]) -> int:
    """Threads of a product of one of `num_workers` that share these cores; OMP_NUM_THREADS wins where it is set."""
    told = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    if told.isdecimal() and int(told):
        return int(told)
    left = cores - 1 if beside_router and cores >= ROUTERS_FROM else cores
    return max(1, left // num_workers)


def keep_off_last(num_workers: int) -> int | None:
    """Leave the last processor that this process may run on to the router, with all threads that there are; which it
    is, or None where each of `num_workers` needs one of its own.

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


def parse_cores(text: str) -> set[int]:
    """`0-2,5` -> {0, 1, 2, 5}. Raises ValueError("must be …")."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = [first, last if dash else first]
        if not all(end.isdecimal() for end in ends) or int(ends[1]) < int(ends[0]):
            raise ValueError(f"must be numbers of processors such as 0-2,5; got {text!r}")
        found |= set(range(int(ends[0]), int(ends[1]) + 1))
    return found


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _siblings(processors: Path, number: int) -> str:
    """What all hardware threads of one core have in common; the processor itself where the system does not say."""
    try:
        return (processors / f"cpu{number}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(number)


def _quotas(root: Path, own: Path) -> Iterator[float]:
    """Processors' worth of time that each control group around this process may use, version 2 or 1."""
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
