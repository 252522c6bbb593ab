"""Small files that are made once and kept in the cache, for all processes of a user."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

_log = logging.getLogger(__name__)


def keep_files(kind: str, source: str, version: str, make: Callable[[], Mapping[str, str]]) -> Path:
    """Return the folder `kind/source-version` of the cache; if it is missing, `make` returns each of its files' text by
    name.

    `source`: a hash of what the files are made from; `version`: of the code that makes them. It is written atomically.
    Folders of other versions are left as they are, which the log says. Raises OSError if no folder can be written, and
    what `make` raises.
    """
    name = f"{source}-{version}"
    places = [place / kind for place in _places()]
    for place in places:
        if (place / name).is_dir():
            return place / name
    texts = make()
    others = sum(1 for place in places for _ in place.glob(f"{source}-*"))
    if others:
        _log.info("%s: made anew for this version; %d of other versions are not used", places[0] / name, others)
    failures = []
    for place in places:
        try:
            return _write(place / name, texts)
        except OSError as error:
            failures.append(f"{place} ({error.strerror or error})")
    raise OSError(
        f"its texts can be written neither to {' nor to '.join(failures)}. Set XDG_CACHE_HOME to a folder that may be "
        "written."
    )


def _places() -> Iterator[Path]:
    """Yield folders to try: the cache, and if it cannot be written (read-only root, no home) a private temporary
    folder.
    """
    given = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # no home folder
        yield (Path(given) if given else Path.home() / ".cache") / "spaceserve"
    user = os.getuid() if hasattr(os, "getuid") else 0
    own = Path(tempfile.gettempdir()) / f"spaceserve-{user}"
    with contextlib.suppress(OSError):
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o022:
            yield own


def _write(folder: Path, texts: Mapping[str, str]) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, text in texts.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).write_text(text, encoding="utf-8")
        partial.chmod(0o755)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process has already moved the same files there
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
