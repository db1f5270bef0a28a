"""glibc malloc settings for processes that allocate the same sizes every step: CPU trainers and the driver."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER = 2**31 - 1
LIBC = ctypes.CDLL(None)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next tensor; do nothing with another C library.

    By default glibc maps every large tensor anew and unmaps it when freed. The kernel zeroes each page before the
    first write. That costs a tenth of a training step, and about half of the driver's own work.
    """
    if hasattr(LIBC, "mallopt"):
        LIBC.mallopt(M_MMAP_MAX, 0)
        LIBC.mallopt(M_TRIM_THRESHOLD, NEVER)


def return_freed_memory() -> None:
    """Return freed memory to the kernel; do nothing with another C library.

    Call it after freeing memory that later tensors cannot reuse: threads that read files have heaps of their own.
    """
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)
