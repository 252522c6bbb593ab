"""Configures how torch's OpenMP threads wait for each other."""

from __future__ import annotations

from collections.abc import MutableMapping


def sleep_soon(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP threads sleep after some 1.3 ms of waiting, unless the environment sets how they wait.

    By default they spin for 20 ms, which on a shared machine uses up most of their time slice. OpenMP reads this when
    it is loaded, so call it before importing torch. With a shorter time they would sleep between two of torch's
    operations on a quiet machine, which took a third of the rate at 16 sequences in float32.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "20000")
