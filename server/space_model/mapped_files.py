"""Memory-mapped weight files: how much of them is resident, and releasing it."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

SMALL = 1 << 18
"""Tensors of fewer bytes are not worth releasing."""


@dataclass(frozen=True)
class Mapping:
    """An address range that maps a file."""

    start: int
    end: int
    resident: int  # bytes in memory
    changed: int  # bytes that were written to and differ from the file


def mappings(files: Collection[Path], smaps: Path = Path("/proc/self/smaps")) -> Iterator[Mapping]:
    """Yield the mappings of these files (Linux only)."""
    wanted = {str(file.resolve()) for file in files}
    try:
        lines = smaps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    span: tuple[int, int] | None = None
    resident = 0
    for line in lines:
        name, _, rest = line.partition(": ")
        if name == "Rss":
            resident = int(rest.split()[0]) * 1024
        elif name == "Anonymous" and span is not None:
            yield Mapping(*span, resident, int(rest.split()[0]) * 1024)
            span = None
        elif "-" in line.split(" ", 1)[0] and not name.endswith(":"):
            first, _, last = line.split(" ", 1)[0].partition("-")
            path = line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) == 6 else ""
            span = (int(first, 16), int(last, 16)) if path in wanted else None


def give_back(files: Collection[Path]) -> int:
    """Release the resident pages of these files and return their bytes; a later access reads them from disk again.

    Most weights are packed and not read again, but the embedding is, and keeps the whole file mapped. Mappings that
    were written to are kept, because the file does not have the changes.
    """
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError):
        return 0
    given = 0
    for here in list(mappings(files)):
        length = ctypes.c_size_t(here.end - here.start)
        if not here.changed and madvise(ctypes.c_void_p(here.start), length, mmap.MADV_DONTNEED) == 0:
            given += here.resident
    return given


def let_go(tensor: Tensor) -> None:
    """Release the pages under this tensor, if it is a view of a mapped weight file: it was copied or packed.

    A later access reads them from disk again. Other tensors are left alone.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu" or not tensor.numel():
        return
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = tensor.data_ptr()
    end = start + span * tensor.itemsize
    if end - start < SMALL:
        return
    page = mmap.PAGESIZE
    first, last = start + -start % page, end - end % page
    if not _is_of_weights(start, end):
        return
    try:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
    except (AttributeError, OSError):
        return


def _is_of_weights(start: int, end: int, maps: Path = Path("/proc/self/maps")) -> bool:
    """Return whether these addresses are in one mapped safetensors or GGUF file."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        if line.lower().endswith((".safetensors", ".gguf")):
            first, _, last = line.split(" ", 1)[0].partition("-")
            if int(first, 16) <= start and end <= int(last, 16):
                return True
    return False
