"""Files of weights that this process has mapped: what of them lies in memory, and giving it back."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

SMALL = 1 << 18
"""Bytes of a tensor that is not worth letting go of."""


@dataclass(frozen=True)
class Mapping:
    """A stretch of addresses that a file lies at."""

    start: int
    end: int
    resident: int  # bytes in memory
    changed: int  # bytes of it that were written to, and are not the file's any more


def mappings(files: Collection[Path], smaps: Path = Path("/proc/self/smaps")) -> Iterator[Mapping]:
    """Where these files are mapped (Linux; nowhere else)."""
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
    """Let go of the pages of these files that lie in memory, and say how many bytes: who reads one again has it again.

    Weights are packed out of them and then read no more; but the embedding is, and keeps the whole file mapped. What
    somebody has written to stays, for the file does not have it.
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
    """Give back the pages that lie under this tensor, if it is a view of a mapped file of weights: it was copied or
    packed, and whoever reads it again has them again. Any other tensor stays as it is.
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
    """These addresses are those of one mapped safetensors or GGUF file."""
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
