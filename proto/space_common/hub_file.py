"""One file of the hub, into huggingface_hub's own cache, going on where an earlier try was cut off.

huggingface_hub 2 forgets what a killed process had of a file; a shard of a large model is gigabytes.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTIAL = ".partial"
"""Ends the name of what has come of a file so far."""

PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds between tries that bring nothing; one that brings something begins anew."""

READ_SECONDS = 30.0


class Damaged(OSError):
    """What came is not what the hub has."""


@dataclass(frozen=True)
class HubFile:
    """A file of a model at a commit."""

    model: str
    commit: str
    name: str
    cache: Path  # of all models
    token: str | None

    def fetch(self) -> None:
        """Have it in the cache. Raises what the network or huggingface_hub raises, and OSError."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url, utils

        url = hf_hub_url(self.model, self.name, revision=self.commit)
        found = get_hf_file_metadata(url, token=self.token)
        if found.etag is None or found.size is None:
            raise OSError(f"the hub says neither size nor tag of {self.name}")
        home = self.cache / f"models--{self.model.replace('/', '--')}"
        blob = home / "blobs" / found.etag
        lock = self.cache / ".locks" / home.name / f"{found.etag}.lock"
        for folder in (blob.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        library: Any = utils  # which does not say to type checkers what it exports
        with library.WeakFileLock(lock):
            if not blob.exists():
                part = blob.with_name(f"{found.etag}{PARTIAL}")
                self._complete(url, part, found.size)
                _check(part, found.etag, self.name)
                part.replace(blob)
            _link(home / "snapshots" / self.commit / self.name, blob)

    def _complete(self, url: str, part: Path, size: int) -> None:
        """Try until all of it is there, as long as something comes now and then."""
        failures = 0
        while (have := part.stat().st_size if part.exists() else 0) != size:
            if have > size:
                part.unlink()
                continue
            failure: Exception | None = None
            try:
                self._go_on(url, part, have)
            except Exception as error:
                if not _may_pass(error):
                    raise
                failure = error
            if part.exists() and part.stat().st_size > have:
                failures = 0
            elif failures < len(PAUSES):
                time.sleep(PAUSES[failures])
                failures += 1
            else:
                raise failure or Damaged(f"{self.name} ends after {have} of {size} bytes, again and again")

    def _go_on(self, url: str, part: Path, have: int) -> None:
        """Append what comes from there on."""
        from huggingface_hub import utils

        library: Any = utils
        headers = library.build_hf_headers(token=self.token) | {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        session = library.get_session()
        with session.stream("GET", url, headers=headers, timeout=READ_SECONDS, follow_redirects=True) as answer:
            library.hf_raise_for_status(answer)
            whole = have and answer.status_code == 200  # somebody between here and the hub takes no ranges
            with part.open("wb" if whole else "ab") as file:
                for piece in answer.iter_bytes():
                    file.write(piece)


def _may_pass(error: Exception) -> bool:
    """The network's failures and the hub's own; not a refusal, and not a full disk."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return status >= 500 or status in (408, 429)
    network: Any = HfHubHTTPError.__mro__[1]  # HTTPError of whichever httpx the library was built on
    return isinstance(error, (network, ConnectionError))


def _check(part: Path, etag: str, name: str) -> None:
    """Large files are tagged with their sha256."""
    if len(etag) != 64:
        return
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != etag:
        part.unlink()
        raise Damaged(f"{name} came damaged (sha256 {digest[:12]}…, wanted {etag[:12]}…); it is fetched anew next time")


def _link(place: Path, blob: Path) -> None:
    """As huggingface_hub does; a copy where the file system has no links."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        return
    try:
        place.symlink_to(os.path.relpath(blob, place.parent))
    except OSError:
        os.link(blob, place)
