"""Rate limits per API key: requests and tokens per minute, concurrent requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from space_router.api_keys import ApiKey, KeyLimits
from space_router.errors import RateLimited
from space_router.metrics import Metrics

NO_KEY = "none"
"""Label for requests when the server has no keys."""


class TokenBucket:
    """A token bucket with one minute's capacity. It may be overdrawn, and is then empty until refilled above zero."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_second = per_minute / 60
        self._full = float(per_minute)
        self._level = self._full
        self._then = now

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` is available, 0 if it is. More than the capacity needs a full bucket."""
        self._fill(now)
        return max(0.0, (min(amount, self._full) - self._level) / self._per_second)

    def take(self, amount: float, now: float) -> None:
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self._full, self._level + (now - self._then) * self._per_second)
        self._then = now


class RateLimit:
    """The limits and counts of one key."""

    def __init__(self, name: str, limits: KeyLimits, metrics: Metrics, clock: Callable[[], float]) -> None:
        now = clock()
        self._name, self._limits, self._clock = name, limits, clock
        self._requests = None if limits.requests_per_minute is None else TokenBucket(limits.requests_per_minute, now)
        self._tokens = None if limits.tokens_per_minute is None else TokenBucket(limits.tokens_per_minute, now)
        self._num_running = 0
        label = name or NO_KEY
        self._running = metrics.key_requests.labels(key=label)
        self._taken = metrics.key_requests_total.labels(key=label)
        self._prompt = metrics.key_tokens_total.labels(key=label, kind="prompt")
        self._generated = metrics.key_tokens_total.labels(key=label, kind="generated")
        self._refused = {
            kind: metrics.key_rejected_total.labels(key=label, limit=kind)
            for kind in ("requests", "tokens", "concurrency")
        }

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request while the block runs. Raises RateLimited."""
        now, limits = self._clock(), self._limits
        if limits.concurrency is not None and self._num_running >= limits.concurrency:
            self._refuse("concurrency", f"{limits.concurrency} requests at once", 1.0)
        if self._requests is not None and (wait := self._requests.wait(1, now)):
            self._refuse("requests", f"{limits.requests_per_minute} requests a minute", wait)
        if self._tokens is not None and (wait := self._tokens.wait(1, now)):
            self._refuse("tokens", f"{limits.tokens_per_minute} tokens a minute", wait)
        if self._requests is not None:
            self._requests.take(1, now)
        self._num_running += 1
        self._taken.inc()
        self._running.inc()
        try:
            yield
        finally:
            self._num_running -= 1
            self._running.dec()

    def charge(self, num_prompt: int, num_generated: int) -> None:
        """Charge prompt and generated tokens."""
        self._prompt.inc(num_prompt)
        self._generated.inc(num_generated)
        if self._tokens is not None:
            self._tokens.take(num_prompt + num_generated, self._clock())

    def _refuse(self, kind: str, bound: str, wait: float) -> None:
        self._refused[kind].inc()
        whose = "This API key is" if self._name else "All clients together are"
        raise RateLimited(f"{whose} allowed {bound}. Try again in {math.ceil(max(1.0, wait))} s.", retry_after=wait)


class RateLimits:
    """The limits of all keys by name; without keys, one for all clients together."""

    def __init__(
        self,
        keys: Sequence[ApiKey],
        limits: KeyLimits,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limits`: defaults for keys without limits of their own."""
        known = {key.name: key.limits.over(limits) for key in keys} or {"": limits}
        self._of = {name: RateLimit(name, limits, metrics, clock) for name, limits in known.items()}

    def of(self, name: str) -> RateLimit:
        """Return the limits of a key by its name."""
        return self._of[name]
