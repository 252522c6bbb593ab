"""API keys, re-read when their file changes, and their limits: requests and tokens per minute, concurrent requests."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from space_common.certificate import file_stamp

from space_router.errors import ConfigError, RateLimited
from space_router.setting import whole

if TYPE_CHECKING:
    from space_router.metrics import Metrics

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at the key file
HASHED = "sha256:"  # before the digest that stands for a key

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
    expires: float | None = None  # Unix seconds from which it is refused; None: never
    is_plain: bool = True  # its file has the key itself, not its digest

    @classmethod
    def of(
        cls,
        secret: str,
        name: str | None = None,
        limits: KeyLimits = NO_LIMITS,
        *,
        is_operator: bool = False,
        expires: float | None = None,
    ) -> ApiKey:
        """Return the key for a secret, or for `sha256:` and its digest in hex; without a `name` it is the first 16 hex
        digits of the digest. Raises ValueError for anything else behind `sha256:`."""
        is_plain = not secret.startswith(HASHED)
        if is_plain:
            digest = hashlib.sha256(secret.encode()).digest()
        else:
            hexadecimal = secret.removeprefix(HASHED)
            if not re.fullmatch(r"[0-9a-fA-F]{64}", hexadecimal):
                raise ValueError(f"behind {HASHED} go the 64 hex digits of the key's SHA-256")
            digest = bytes.fromhex(hexadecimal)
        return cls(digest, name or digest.hex()[:16], limits, is_operator, expires, is_plain)


@dataclass(frozen=True)
class KeySource:
    """Where a server's keys are written: a file, and the environment's list."""

    file: str | None = None
    given: str = ""  # keys separated by commas

    def read(self) -> tuple[ApiKey, ...]:
        """Read the keys. Raises ConfigError as `read_keys` does."""
        return read_keys(self.file, self.given)

    def stamp(self) -> tuple[int, ...] | None:
        """Return what changes with the file; None without one. Links are followed."""
        return None if self.file is None else file_stamp(Path(self.file).expanduser())


class ApiKeys:
    """The keys of one server. Their file is looked at once a second, when a request comes, and read again if it has
    changed: rewritten, replaced, or a link to it switched. A file that cannot be used changes nothing and is logged."""

    def __init__(
        self,
        keys: Sequence[ApiKey],
        source: KeySource | None = None,
        on_change: Callable[[Sequence[ApiKey]], None] = lambda _: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`source`: None: the keys never change. `on_change`: called with all keys that are then known. `clock`:
        seconds between looks; `now`: Unix seconds, which end keys that expire."""
        self._keys = tuple(keys)
        self._source, self._on_change = source, on_change
        self._clock, self._now = clock, now
        self._seen = None if source is None else source.stamp()
        self._looked = clock()

    def name_of(self, authorization: str, api_key: str = "") -> str | None:
        """Return the name of the key in an `Authorization` header, else in an `x-api-key` header (Latin-1), or None if
        it is missing, unknown or expired.

        Returns "" if the server has no keys. All keys are compared, so the time does not depend on which one matches.
        """
        if not self._keys:
            return ""
        if self._source is not None and self._clock() - self._looked >= LOOK_SECONDS:
            self.refresh()
        kind, _, given = authorization.partition(" ")
        found = [self._named(text) for text in (given if kind.lower() == "bearer" else "", api_key)]
        return next((name for name in found if name is not None), None)

    def _named(self, given: str) -> str | None:
        digest = hashlib.sha256(given.strip().encode("latin-1", "replace")).digest()
        known = [hmac.compare_digest(digest, key.digest) for key in self._keys]
        if not any(known):
            return None
        key = self._keys[known.index(True)]
        return None if key.expires is not None and self._now() >= key.expires else key.name

    def refresh(self, *, is_forced: bool = False) -> None:
        """Read the file again if it has changed, or in any case where that `is_forced`."""
        self._looked = self._clock()
        if self._source is None or self._source.file is None or not self._keys:
            return
        stamp = self._source.stamp()
        if stamp == self._seen and not is_forced:
            return
        self._seen = stamp
        try:
            keys = self._source.read()
        except ConfigError as error:
            log.warning("the API keys stay as they are: %s", error)
            return
        if self._source.stamp() != stamp:  # changed while it was read: the next look reads it again
            self._seen = None
        before, self._keys = {key.digest for key in self._keys}, keys
        after = {key.digest for key in keys}
        log.info("API keys were read again: %d, %d new, %d gone", len(keys), len(after - before), len(before - after))
        warn_of_plain_keys(keys, self._source.file)
        self._on_change(keys)

    def is_operator(self, name: str) -> bool:
        """Return whether the key of this name may change the server for all clients."""
        return any(key.is_operator for key in self._keys if key.name == name)


def warn_of_plain_keys(keys: Sequence[ApiKey], file: str | None) -> None:
    """Log that a file has keys that any reader of it can use."""
    if file is not None and (count := sum(key.is_plain for key in keys)):
        log.warning(
            "%s has %d API keys that can be read; write their digests instead, sha256:HEX, which "
            "`printf %%s KEY | sha256sum` prints",
            file,
            count,
        )


def plain_keys(*secrets: str) -> tuple[ApiKey, ...]:
    """Return keys without names or limits of their own, without duplicates."""
    return tuple(ApiKey.of(secret) for secret in dict.fromkeys(secrets))


def read_keys(file: str | None, given: str) -> tuple[ApiKey, ...]:
    """Read API keys from `given`, separated by commas, and from a file with one key per line.

    A line that starts with `#` is a comment. A key may be written as `sha256:` and its digest in hex. After a key:
    `name=NAME`, `operator=yes`, `expires=DATE`, and the limits of KeyLimits with dashes. Raises ConfigError for a file
    that cannot be read, has no key, or has an invalid line; the message has the line's number and never its content.
    """
    try:
        keys = list(plain_keys(*filter(None, map(str.strip, given.split(",")))))
    except ValueError as error:
        raise ConfigError(f"SPACESERVE_API_KEYS: {error}.") from None
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
        if not equals or field not in ("name", "operator", "expires", *_LIMITS):
            others = ", ".join(f"{limit}=N" for limit in _LIMITS)
            raise ValueError(f"behind a key go name=NAME, operator=yes, expires=DATE and {others} only")
        if field in fields:
            raise ValueError(f"{field} is given twice")
        fields[field] = value
    name = fields.pop("name", None)
    if name is not None and not _NAME.fullmatch(name):
        raise ValueError("a name has 1 to 64 letters, digits and . _ : / @ -")
    is_operator = "operator" in fields
    if fields.pop("operator", "yes") != "yes":
        raise ValueError("operator must be yes, or not be there")
    expires = _moment(fields.pop("expires")) if "expires" in fields else None
    limit = whole(1, 10**12, "N")
    limits: dict[str, int] = {}
    for field, value in fields.items():
        try:
            limits[field.replace("-", "_")] = limit.parse(value)
        except ValueError as error:
            raise ValueError(f"{field} {error}") from None
    return ApiKey.of(secret, name, KeyLimits(**limits), is_operator=is_operator, expires=expires)


def _moment(text: str) -> float:
    """Return Unix seconds of an ISO 8601 date (its beginning) or time; UTC where it names no zone."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("expires is a date such as 2027-01-31, or a time such as 2027-01-31T18:00:00Z") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


BYTES_PER_TOKEN = 64
"""Bytes that are charged as one token where text is only tokenised: far less work than a token of a model."""

NO_KEY = "none"  # label for requests when the server has no keys


class TokenBucket:
    """A token bucket with one minute's capacity. It may be overdrawn, and is then empty until refilled above zero."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._per_second = per_minute / 60
        self._full = float(per_minute)
        self._level = self._full
        self._then = now

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` is available, 0 if it is. More than the capacity needs a full bucket."""
        self._fill(now)
        return max(0.0, (min(amount, self._full) - self._level) / self._per_second)

    def remaining(self, now: float) -> int:
        """Return how much is available, in whole units; 0 if it is overdrawn."""
        self._fill(now)
        return max(0, math.floor(self._level))

    def take(self, amount: float, now: float) -> None:
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self._full, self._level + (now - self._then) * self._per_second)
        self._then = now


class RateLimit:
    """The limits and counts of one key."""

    def __init__(self, name: str, limits: KeyLimits, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._name, self._clock = name, clock
        self._limits = NO_LIMITS
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.limit_to(limits)
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

    def limit_to(self, limits: KeyLimits) -> None:
        """Set other limits; a rate that changes begins anew."""
        now, before, self._limits = self._clock(), self._limits, limits
        if limits.requests_per_minute != before.requests_per_minute:
            rate = limits.requests_per_minute
            self._requests = None if rate is None else TokenBucket(rate, now)
        if limits.tokens_per_minute != before.tokens_per_minute:
            rate = limits.tokens_per_minute
            self._tokens = None if rate is None else TokenBucket(rate, now)

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

    def headers(self) -> dict[str, str]:
        """Return OpenAI's `x-ratelimit-*` headers, for the limits that there are."""
        now = self._clock()
        buckets = (("requests", self._requests), ("tokens", self._tokens))
        found: dict[str, str] = {}
        for kind, bucket in buckets:
            if bucket is not None:
                found[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{kind}"] = str(bucket.remaining(now))
                found[f"x-ratelimit-reset-{kind}"] = f"{bucket.wait(bucket.per_minute, now):.3f}s"
        return found

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


class RateLimits(dict[str, RateLimit]):
    """The limits of all keys by name; without keys, one for all clients together, named "".

    A key that is gone keeps its counts, for requests that it began and for metrics.
    """

    def __init__(
        self,
        keys: Sequence[ApiKey],
        defaults: KeyLimits,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`defaults`: for keys without limits of their own."""
        super().__init__()
        self._defaults, self._metrics, self._clock = defaults, metrics, clock
        self.update_keys(keys)

    def update_keys(self, keys: Sequence[ApiKey]) -> None:
        """Add limits for new names, and change those of others."""
        known = {key.name: key.limits.over(self._defaults) for key in keys} or {"": self._defaults}
        for name, limits in known.items():
            if name in self:
                self[name].limit_to(limits)
            else:
                self[name] = RateLimit(name, limits, self._metrics, self._clock)
