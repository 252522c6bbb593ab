"""Memory that a training process on a CPU has freed."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST = 32 << 20  # bytes: the largest threshold that glibc takes


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory for the next tensor. It otherwise returns large blocks to Linux at once, and
    each new one costs a page fault for every 4 KiB, which is more than computing it. Other C libraries are left alone.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST)
    mallopt(M_TRIM_THRESHOLD, -1)
