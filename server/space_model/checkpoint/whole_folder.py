"""Writes a folder atomically: it is complete or absent, even if the process is killed."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

PARTIAL, REPLACED = ".partial", ".replaced"
"""Suffixes of the folder being written, and of the one it replaces."""


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, which replaces `folder` after the block; if the block raises, it is removed.

    model.partial    written .......... |
    model            the old ......... | | the new
    model.replaced                     | the old |            if killed here, both are complete; the next call finishes
    """
    folder = folder.resolve()  # if it is a link, write to the disk that it leads to
    partial, replaced = folder.with_name(folder.name + PARTIAL), folder.with_name(folder.name + REPLACED)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a partial model would only fill the disk
        raise
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
