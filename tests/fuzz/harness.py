"""Runs one property over many hostile inputs, with limits on its memory and on the seconds of each input."""

from __future__ import annotations

import asyncio
import faulthandler
from collections import Counter
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

Input = TypeVar("Input")

SECONDS = 30.0
"""Longest time that one input may take: three times the longest limit inside the server."""

SETTLE_EVERY = 1000


class Finding(AssertionError):
    """An input made the code do something that no input may."""


class Fuzzer:
    """Tries hostile inputs within one test. Made by the `fuzzer` fixture."""

    def __init__(self, times: int, input_file: Path) -> None:
        """`times`: factor on the number of inputs. `input_file`: holds the input being tried, for use after a crash."""
        self._times, self._input_file = times, input_file
        self._loop = asyncio.Runner()
        self.outcomes: Counter[str] = Counter()

    def close(self) -> None:
        """Close the event loop."""
        self._loop.close()

    def wait(self, coroutine: Coroutine[object, object, Input]) -> Input:
        """Run a coroutine in the loop of this test. Raises TimeoutError after `SECONDS`."""

        async def bounded() -> Input:
            async with asyncio.timeout(SECONDS):
                return await coroutine

        return self._loop.run(bounded())

    def run(
        self,
        inputs: SearchStrategy[Input],
        attempt: Callable[[Input], str],
        *,
        few: int,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        """Try `few` inputs (times `--times`).

        `attempt` returns the outcome in one word and raises for a finding. `settle` raises where inputs have left
        something behind. A process that hangs ends with the stack of every thread on stderr.
        """

        @settings(
            max_examples=few * self._times,
            deadline=timedelta(seconds=SECONDS),
            database=None,
            derandomize=self._times == 1,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(inputs)
        def try_one(hostile: Input) -> None:
            written.seek(0)
            written.write(repr(hostile).encode("utf-8", "backslashreplace"))
            written.truncate()
            faulthandler.dump_traceback_later(2 * SECONDS, exit=True)
            self.outcomes[attempt(hostile)] += 1
            if self.outcomes.total() % SETTLE_EVERY == 0:
                settle()

        with self._input_file.open("wb", buffering=0) as written:
            try:
                try_one()
                settle()
            finally:
                faulthandler.cancel_dump_traceback_later()
        self._input_file.unlink()
        assert few < 10 or len(self.outcomes) > 1, f"every input ends alike, so they reach nothing: {self.outcomes}"
