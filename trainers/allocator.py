"""Memory allocation of a process that needs arrays of the same sizes in every step: a trainer on a CPU, the driver."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next tensor; do nothing with another C library.

    By default every large tensor is mapped again and unmapped when it is freed, and the kernel zeroes each of its
    pages before the first write. That costs a tenth of a training step, and of the driver's own work about a half.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, NEVER)
