"""How a training process on a CPU holds on to memory."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next tensor; where there is another C library, do nothing.

    By default a large tensor is mapped anew and given back when it is freed, and the kernel fills every page of
    it with zeros before the first write: a tenth of the time of a training step, for nothing.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, NEVER)
