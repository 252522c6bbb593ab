"""How long a worker may be silent, or not step, before it is considered hung."""

from __future__ import annotations

FLOOR = 5.0  # minimum seconds of silence: a live worker reports every second
SLOWEST_STEP_FACTOR = 20.0  # a step may take this multiple of the slowest recent step
DECAY = 0.999  # of the slowest step, per step: a long prompt counts for about a thousand steps
MAX_STALL_FACTOR = 10.0  # maximum time without a due step, as a multiple of `most`: kernels may be compiling
MIN_STEPS = 50  # steps before this worker's own step times are used


class Watchdog:
    """Time limits for one worker, in seconds, derived from its start and its steps.

    A worker is declared dead only after being silent for as long as its start took. Waiting for a hung worker costs the
    wait, restarting a healthy one costs a start; so the total is at most twice the optimum.
    """

    def __init__(self, most: float, *, start_seconds: float = 0.0) -> None:
        """`most`: maximum seconds of silence, however long steps and start take; `start_seconds`: of the start."""
        self._most = most
        self._start_seconds = start_seconds
        self._slowest = 0.0
        self._num_steps = 0

    def stepped(self, seconds: float) -> None:
        """Record a step that took `seconds`."""
        self._slowest = max(seconds, DECAY * self._slowest)
        self._num_steps += 1

    @property
    def silence(self) -> float:
        """Limit without any report, as from a process that is stopped or never releases the GIL."""
        return min(self._most, max(FLOOR, SLOWEST_STEP_FACTOR * self._slowest, self._start_seconds))

    @property
    def stall(self) -> float:
        """Limit without a due step: a worker with a hung device may still send its periodic reports."""
        if self._num_steps < MIN_STEPS:
            return MAX_STALL_FACTOR * self._most
        return max(self._most, min(MAX_STALL_FACTOR * self._most, SLOWEST_STEP_FACTOR * self._slowest))
