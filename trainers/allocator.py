"""Memory allocation of a process that needs arrays of the same sizes in every step: a trainer on a CPU, the driver."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER = 2**31 - 1
LIBC = ctypes.CDLL(None)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next tensor; do nothing with another C library.

    By default every large tensor is mapped again and unmapped when it is freed, and the kernel zeroes each of its
    pages before the first write. That costs a tenth of a training step, and of the driver's own work about a half.
    """
    if hasattr(LIBC, "mallopt"):
        LIBC.mallopt(M_MMAP_MAX, 0)
        LIBC.mallopt(M_TRIM_THRESHOLD, NEVER)


def return_freed_memory() -> None:
    """Give the kernel back what was freed until now; do nothing with another C library.

    For where much is freed that no next tensor fits into: threads that read files have heaps of their own.
    """
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)
