"""API keys and their limits: requests and tokens per minute, concurrent requests."""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from space_router.errors import ConfigError, RateLimited
from space_router.setting import whole

if TYPE_CHECKING:
    from space_router.metrics import Metrics

_NAME = re.compile(r"[A-Za-z0-9._:/@-]{1,64}")
_LIMITS = ("requests-per-minute", "tokens-per-minute", "concurrency")


class KeyLimits(NamedTuple):
    """Limits of one key; None: the server's default."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None

    def over(self, others: KeyLimits) -> KeyLimits:
        """Return these limits, with `others` where these are None."""
        return KeyLimits(*(other if own is None else own for own, other in zip(self, others, strict=True)))


NO_LIMITS = KeyLimits()


@dataclass(frozen=True)
class ApiKey:
    """One key's digest, name and limits; the key itself is not kept.

    Digests are compared, so that timing reveals nothing about a key's characters or length.
    """

    digest: bytes  # sha256
    name: str  # may be logged; a label of metrics
    limits: KeyLimits = NO_LIMITS
    is_operator: bool = False  # may change the server for all clients

    @classmethod
    def of(
        cls, secret: str, name: str | None = None, limits: KeyLimits = NO_LIMITS, *, is_operator: bool = False
    ) -> ApiKey:
        """Return the key for a secret; without a `name` it is the first 16 hex digits of the digest."""
        digest = hashlib.sha256(secret.encode()).digest()
        return cls(digest, name or digest.hex()[:16], limits, is_operator)


class ApiKeys:
    """The keys of one server."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)

    def name_of(self, authorization: str) -> str | None:
        """Return the name of the key in an `Authorization` header (Latin-1), or None if it is missing or unknown.

        Returns "" if the server has no keys. All keys are compared, so the time does not depend on which one matches.
        """
        if not self._keys:
            return ""
        kind, _, given = authorization.partition(" ")
        offered = given.strip().encode("latin-1", "replace") if kind.lower() == "bearer" else b""
        digest = hashlib.sha256(offered).digest()
        known = [hmac.compare_digest(digest, key.digest) for key in self._keys]
        return self._keys[known.index(True)].name if any(known) else None

    def is_operator(self, name: str) -> bool:
        """Return whether the key of this name may change the server for all clients."""
        return any(key.is_operator for key in self._keys if key.name == name)


def plain_keys(*secrets: str) -> tuple[ApiKey, ...]:
    """Return keys without names or limits of their own, without duplicates."""
    return tuple(ApiKey.of(secret) for secret in dict.fromkeys(secrets))


def read_keys(file: str | None, given: str) -> tuple[ApiKey, ...]:
    """Read API keys from `given`, separated by commas, and from a file with one key per line.

    A line that starts with `#` is a comment. After a key: `name=NAME`, `operator=yes`, and the limits of KeyLimits with
    dashes. Raises ConfigError for a file that cannot be read, has no key, or has an invalid line; the message has the
    line's number and never its content.
    """
    keys = list(plain_keys(*filter(None, map(str.strip, given.split(",")))))
    if file is not None:
        try:
            lines = Path(file).expanduser().read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
            raise ConfigError(f"--api-key-file={file!r}: cannot be read: {reason}.") from None
        found = [(n, line.split()) for n, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
        if not found:
            raise ConfigError(f"--api-key-file={file!r}: holds no key; write one per line.")
        for number, words in found:
            try:
                key = _key(words)
            except ValueError as error:
                raise ConfigError(f"--api-key-file={file!r}, line {number}: {error}.") from None
            if all(key.digest != other.digest for other in keys):
                keys.append(key)
    names = [key.name for key in keys]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"--api-key-file={file!r}: two keys are named {twice!r}; give each a name of its own.")
    return tuple(keys)


def _key(words: list[str]) -> ApiKey:
    secret, *rest = words
    fields: dict[str, str] = {}
    for word in rest:
        field, equals, value = word.partition("=")
        if not equals or field not in ("name", "operator", *_LIMITS):
            others = ", ".join(f"{limit}=N" for limit in _LIMITS)
            raise ValueError(f"behind a key go name=NAME, operator=yes and {others} only")
        if field in fields:
            raise ValueError(f"{field} is given twice")
        fields[field] = value
    name = fields.pop("name", None)
    if name is not None and not _NAME.fullmatch(name):
        raise ValueError("a name has 1 to 64 letters, digits and . _ : / @ -")
    is_operator = "operator" in fields
    if fields.pop("operator", "yes") != "yes":
        raise ValueError("operator must be yes, or not be there")
    limit = whole(1, 10**12, "N")
    limits: dict[str, int] = {}
    for field, value in fields.items():
        try:
            limits[field.replace("-", "_")] = limit.parse(value)
        except ValueError as error:
            raise ValueError(f"{field} {error}") from None
    return ApiKey.of(secret, name, KeyLimits(**limits), is_operator=is_operator)


BYTES_PER_TOKEN = 64
"""Bytes that are charged as one token where text is only tokenised: far less work than a token of a model."""

NO_KEY = "none"  # label for requests when the server has no keys


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

    def charge(self, num_prompt: int, num_generated: int, num_charged: float) -> None:
        """Count prompt and generated tokens, and charge the prompt's and `num_charged` for the generated ones."""
        self._prompt.inc(num_prompt)
        self._generated.inc(num_generated)
        if self._tokens is not None:
            self._tokens.take(num_prompt + num_charged, self._clock())

    def charge_bytes(self, num_bytes: int) -> None:
        """Charge text that is only tokenised, by its size."""
        if self._tokens is not None:
            self._tokens.take(num_bytes / BYTES_PER_TOKEN, self._clock())

    def _refuse(self, kind: str, bound: str, wait: float) -> None:
        self._refused[kind].inc()
        whose = "This API key is" if self._name else "All clients together are"
        raise RateLimited(f"{whose} allowed {bound}. Try again in {math.ceil(max(1.0, wait))} s.", retry_after=wait)


def rate_limits(
    keys: Sequence[ApiKey], defaults: KeyLimits, metrics: Metrics, clock: Callable[[], float] = time.monotonic
) -> dict[str, RateLimit]:
    """Return the limits of all keys by name; without keys, one for all clients together, named "".

    `defaults`: for keys without limits of their own.
    """
    known = {key.name: key.limits.over(defaults) for key in keys} or {"": defaults}
    return {name: RateLimit(name, limits, metrics, clock) for name, limits in known.items()}
