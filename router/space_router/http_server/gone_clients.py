"""The log's lines about clients that go away: each of a few, and a count of many."""

import logging
import time
from collections.abc import Callable

MOST_LINES = 10  # in one interval
INTERVAL = 60.0  # seconds

_log = logging.getLogger(__name__)


class GoneClients:
    """Logs the first clients of each interval that go away; the first line of a later one counts those left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._num_seen = 0

    def log(self, line: str) -> None:
        """Log that a client went away, unless `MOST_LINES` such lines were logged within `INTERVAL`."""
        now = self._clock()
        if now - self._began >= INTERVAL:
            if (left_out := self._num_seen - MOST_LINES) > 0:
                _log.info("%d more clients went away in the %.0f s before, without a line", left_out, now - self._began)
            self._began, self._num_seen = now, 0
        self._num_seen += 1
        if self._num_seen <= MOST_LINES:
            _log.info("%s", line)


gone_clients = GoneClients()
"""Of this process."""
