"""How long a worker may say nothing, or not step, before it is taken for hung."""

from __future__ import annotations

FLOOR = 5.0  # seconds of silence that are always forgiven: a worker that lives speaks every second
STEPS = 20.0  # times the slowest recent step: what takes that much longer than ever will not come back
FADING = 0.999  # of the slowest step, per step: a long prompt is remembered for about a thousand
SILENT_STEPS = 10.0  # the most, times without a step, though one is due: kernels may be compiled meanwhile
KNOWN_STEPS = 50  # steps after which those of this worker say how long one takes


class Watchdog:
    """Patience with one worker, in seconds; it grows with the steps that this worker takes.

    Waiting for a worker that hangs costs as long as one waits, and starting one again that does not costs what a start
    costs. So nobody is given up before he has been silent for as long as his start took: whoever waits so long loses
    at most twice what he would have, had he known.
    """

    def __init__(self, most: float, *, start_seconds: float = 0.0) -> None:
        """`most`: of silence, however long its steps or its start."""
        self._most = most
        self._start_seconds = start_seconds
        self._slowest = 0.0
        self._num_steps = 0

    def stepped(self, seconds: float) -> None:
        """A step took so long."""
        self._slowest = max(seconds, FADING * self._slowest)
        self._num_steps += 1

    @property
    def silence(self) -> float:
        """Without a word: not even the heart beats, as in a process that is stopped or holds its interpreter."""
        return min(self._most, max(FLOOR, STEPS * self._slowest, self._start_seconds))

    @property
    def stall(self) -> float:
        """Without a step, though one is due: the heart may beat beside a hung device."""
        if self._num_steps < KNOWN_STEPS:
            return SILENT_STEPS * self._most
        return max(self._most, min(SILENT_STEPS * self._most, STEPS * self._slowest))
