"""Progress lines of downloads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

PROGRESS_SECONDS = 5.0
"""Seconds between two lines."""


@contextlib.contextmanager
def download_progress(
    name: str, total: int, measure: Callable[[], int], say: Callable[[str], None], *, what: str = ""
) -> Iterator[None]:
    """Say a line at the start, one every few seconds while the block runs, and one at its end unless it raises.

    `measure`: bytes present now, of `total`; `what` follows the name in the first line ("3 files, ").
    """
    before, begun = measure(), time.monotonic()
    resumed = f", {size_text(before)} of them since last time" if before else ""
    say(f"downloading {name}: {what}{size_text(total)}{resumed}")
    over = threading.Event()

    def watch() -> None:
        while not over.wait(PROGRESS_SECONDS):
            done = measure()
            share = f"{size_text(done)} of {size_text(total)}" + (f" ({done / total:.0%})" if total else "")
            if done > before:
                rate = (done - before) / (time.monotonic() - begun)
                pace = f"{size_text(rate)}/s, {max(total - done, 0) / rate:.0f} s left"
            else:  # pip may resolve and connect for longer than one interval
                pace = f"nothing received for {time.monotonic() - begun:.0f} s"
            say(f"downloading {name}: {share}, {pace}")

    watcher = threading.Thread(target=watch, name="download progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    say(f"downloaded {name}: {size_text(total)} in {time.monotonic() - begun:.1f} s")


def size_text(num_bytes: float) -> str:
    """Return the size in the largest fitting unit: 92.9 MB."""
    for unit, bound in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= bound:
            return f"{num_bytes / bound:.1f} {unit}"
    return f"{num_bytes:.0f} B"
