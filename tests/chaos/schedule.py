"""What happens during a day of chaos, and when: a function of the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class EventKind(Enum):
    """What happens to the server, its machine, or its clients."""

    KILL = "worker killed"  # SIGKILL
    STOP = "worker stopped"  # SIGSTOP, later SIGCONT
    DROP = "network broken"  # connections to a worker reset and refused
    HOLD = "network silent"  # no byte passes between router and worker
    UPGRADE = "rolling upgrade"  # all workers, one after the other, to the other protocol minor
    FULL_DISK = "disk full"
    SLOW_DISK = "disk slow"
    MEMORY = "memory pressure"
    CLOCK = "clock jump"  # of the router or a worker, forwards or backwards; stays until the next
    SLOW_READERS = "slow readers"
    FLOOD = "flood"
    HOSTILE = "hostile bodies"

    @property
    def takes_worker(self) -> bool:
        """Whether a worker is lost or may be declared lost."""
        return self in (EventKind.KILL, EventKind.STOP, EventKind.DROP, EventKind.HOLD, EventKind.UPGRADE)


@dataclass(frozen=True)
class Event:
    """One event of the schedule."""

    at: float  # seconds after the begin of the day
    kind: EventKind
    seconds: float  # that it lasts, where it lasts
    draw: float  # of [0, 1): chooses the worker, the size of a jump and the like


def events(seed: int, cycle: float) -> Iterator[Event]:
    """Without end, in order of time: each kind once in every `cycle` seconds, at a random moment of it.

    A day that begins later in the same schedule sees the same events from there on.
    """
    number = 0
    while True:
        source = random.Random(f"{seed} {number}")
        drawn = [
            Event(cycle * (number + source.uniform(0, 0.75)), kind, cycle * source.uniform(0.01, 0.06), source.random())
            for kind in EventKind
        ]
        yield from sorted(drawn, key=lambda event: event.at)
        number += 1
