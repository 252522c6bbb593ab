"""A folder that is there whole or not at all, whenever the process that writes it ends."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

PARTIAL, REPLACED = ".partial", ".replaced"
"""Behind the name of the folder while it is written, and of the one it takes the place of."""


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to write to, which takes the place of `folder` behind the block; where that raises it is removed.

    model.partial    written .......... |
    model            the old ......... | | the new
    model.replaced                     | the old |            killed here, both are whole; the next block ends it
    """
    folder = folder.resolve()  # where it is a link, on the disk that it leads to
    partial, replaced = folder.with_name(folder.name + PARTIAL), folder.with_name(folder.name + REPLACED)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # half a model would only keep a full disk full
        raise
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
