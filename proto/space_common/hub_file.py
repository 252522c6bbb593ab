"""Downloads one file of the hub into huggingface_hub's cache, resuming interrupted downloads.

huggingface_hub 2 discards the partial file of a killed process; a shard of a large model is gigabytes.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTIAL = ".partial"
"""Suffix of a partly downloaded file."""

PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts that make no progress; an attempt with progress starts from the first again."""

READ_SECONDS = 30.0


class Damaged(OSError):
    """The downloaded file differs from the hub's."""


@dataclass(frozen=True)
class HubFile:
    """A file of a model at a commit."""

    model: str
    commit: str
    name: str
    cache: Path  # of all models
    token: str | None

    def fetch(self) -> None:
        """Download the file into the cache if needed. Raises network and huggingface_hub errors, and OSError."""
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
        library: Any = utils  # its exports are not declared to type checkers
        with library.WeakFileLock(lock):
            if not blob.exists():
                part = blob.with_name(f"{found.etag}{PARTIAL}")
                self._complete(url, part, found.size)
                _check(part, found.etag, self.name)
                part.replace(blob)
            _link(home / "snapshots" / self.commit / self.name, blob)

    def _complete(self, url: str, part: Path, size: int) -> None:
        """Retry until the file is complete; gives up after several attempts without progress."""
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
        """Append the bytes from offset `have` on."""
        from huggingface_hub import utils

        library: Any = utils
        headers = library.build_hf_headers(token=self.token) | {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        session = library.get_session()
        with session.stream("GET", url, headers=headers, timeout=READ_SECONDS, follow_redirects=True) as answer:
            library.hf_raise_for_status(answer)
            whole = have and answer.status_code == 200  # a proxy ignores range requests
            with part.open("wb" if whole else "ab") as file:
                for piece in answer.iter_bytes():
                    file.write(piece)


def _may_pass(error: Exception) -> bool:
    """Return whether a retry may help: network failures and the hub's 5xx, not refusals or a full disk."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return status >= 500 or status in (408, 429)
    network: Any = HfHubHTTPError.__mro__[1]  # HTTPError of the httpx that the library was built on
    return isinstance(error, (network, ConnectionError))


def _check(part: Path, etag: str, name: str) -> None:
    """Check the sha256, which is the etag of large files. Raises Damaged."""
    if len(etag) != 64:
        return
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != etag:
        part.unlink()
        raise Damaged(f"{name} came damaged (sha256 {digest[:12]}…, wanted {etag[:12]}…); it is fetched anew next time")


def _link(place: Path, blob: Path) -> None:
    """Link the blob as huggingface_hub does; copy it if the file system has no links."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        return
    try:
        place.symlink_to(os.path.relpath(blob, place.parent))
    except OSError:
        os.link(blob, place)
