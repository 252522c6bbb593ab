"""API keys and their limits."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from space_router.errors import ConfigError, Unauthorized
from space_router.setting import whole

_NAME = re.compile(r"[A-Za-z0-9._:/@-]{1,64}")
_LIMITS = ("requests-per-minute", "tokens-per-minute", "concurrency")


@dataclass(frozen=True)
class KeyLimits:
    """Limits of one key; None: the server's default."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None

    def over(self, others: KeyLimits) -> KeyLimits:
        """Return these limits, with `others` where these are None."""
        return KeyLimits(
            others.requests_per_minute if self.requests_per_minute is None else self.requests_per_minute,
            others.tokens_per_minute if self.tokens_per_minute is None else self.tokens_per_minute,
            others.concurrency if self.concurrency is None else self.concurrency,
        )


@dataclass(frozen=True)
class ApiKey:
    """One key's digest, name and limits; the key itself is not kept.

    Digests are compared, so that timing reveals nothing about a key's characters or length.
    """

    digest: bytes  # sha256
    name: str  # may be logged; a label of metrics
    limits: KeyLimits = KeyLimits()
    is_operator: bool = False  # may change the server for all clients

    @classmethod
    def of(
        cls, secret: str, name: str | None = None, limits: KeyLimits | None = None, *, is_operator: bool = False
    ) -> ApiKey:
        """Return the key for a secret; without a `name` it is the first 16 hex digits of the digest."""
        digest = hashlib.sha256(secret.encode()).digest()
        return cls(digest, name or digest.hex()[:16], limits or KeyLimits(), is_operator)


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

    def refusal(self) -> Unauthorized:
        """Return the error for a request without a valid key."""
        return Unauthorized("The API key is missing or not known. Send `Authorization: Bearer KEY`.")


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
    """Parse the words of a line. Raises ValueError."""
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
