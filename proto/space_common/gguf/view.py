"""Writes a checkpoint's small files (config.json, tokenizer, …) from a GGUF file's header to a folder.

Router and worker read these files from the same folder, so they agree. It is written atomically, once per header and
version of this code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from space_common.gguf.config import check_kinds, config_of
from space_common.gguf.find import GgufError
from space_common.gguf.reader import GgufFile
from space_common.gguf.tensors import sources_of
from space_common.gguf.tokenizer import tokenizer_files


def view_folder(file: Path) -> Path:
    """Return the folder with config.json, tokenizer.json and so on for a GGUF file. Raises GgufError."""
    return view_of(GgufFile.open(file))


def view_of(file: GgufFile) -> Path:
    """Return the folder for a file with its header read. Raises GgufError for an unsupported model."""
    name = f"{file.header_hash[:24]}-{_version()}"
    places = list(_places())
    for place in places:
        if (place / name).is_dir():
            return place / name
    texts = view_files(file)
    failures = []
    for place in places:
        try:
            return _write(place / name, texts)
        except OSError as error:
            failures.append(f"{place} ({error.strerror or error})")
    raise GgufError(
        f"The texts of {file.path} can be written neither to {' nor to '.join(failures)}. Set XDG_CACHE_HOME to a "
        "folder that may be written."
    )


def view_files(file: GgufFile) -> dict[str, str]:
    """Return each file's text by name. Raises GgufError for an unsupported model."""
    check_kinds(file)
    config = config_of(file)
    sources_of(file, config)
    return {"config.json": json.dumps(config, indent=2) + "\n", **tokenizer_files(file.metadata)}


@cache
def _version() -> str:
    """Return eight hexadecimal digits that change with the code that writes these files."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:8]


def _places() -> Iterator[Path]:
    """Yield folders to try: the cache, and if it cannot be written (read-only root, no home) a private temporary
    folder.
    """
    given = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # no home folder
        yield (Path(given) if given else Path.home() / ".cache") / "spaceserve" / "gguf"
    user = os.getuid() if hasattr(os, "getuid") else 0
    own = Path(tempfile.gettempdir()) / f"spaceserve-{user}"
    with contextlib.suppress(OSError):
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o022:
            yield own / "gguf"


def _write(folder: Path, texts: dict[str, str]) -> Path:
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
