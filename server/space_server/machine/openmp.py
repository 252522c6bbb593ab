"""How torch's own threads wait for each other."""

from __future__ import annotations

from collections.abc import MutableMapping


def sleep_soon(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads sleep after some 1.3 ms of waiting, unless the environment says how they wait.

    They would wait awake for 20 ms, which on a machine that other programs use is most of their share of it. OpenMP
    reads this when it is loaded: call it before torch is imported. Shorter, and on a quiet machine they would sleep
    between two of torch's operations, which took a third of the rate at 16 sequences in float32.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "20000")
