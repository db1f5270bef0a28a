"""glibc malloc settings for processes that allocate the same sizes every step: CPU trainers and the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
NEVER = 2**31 - 1
MAPPED_BYTES, MOST_MAPPED = 2**20, 2**16
"""Smallest tensor that `mapping_tensors` maps, and glibc's default for the number of maps."""
LIBC = ctypes.CDLL(None)
_most_mapped = MOST_MAPPED  # outside of `mapping_tensors`: glibc does not tell what it was set to


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next tensor; do nothing with another C library.

    By default glibc maps every large tensor anew and unmaps it when freed. The kernel zeroes each page before the
    first write. That costs a tenth of a training step, and about half of the driver's own work.
    """
    global _most_mapped  # a setting of the whole process, as glibc's own
    if hasattr(LIBC, "mallopt"):
        _most_mapped = 0
        LIBC.mallopt(M_MMAP_MAX, _most_mapped)
        LIBC.mallopt(M_TRIM_THRESHOLD, NEVER)


@contextmanager
def mapping_tensors() -> Generator[None]:
    """Map every tensor of a MiB or more while the body runs, which returns the memory when the tensor is freed.

    For a loop that frees as much as it allocates: glibc does not find a freed block again for an aligned one of the
    same size, so without maps each turn of the loop would take new memory.
    """
    if not hasattr(LIBC, "mallopt"):
        yield
        return
    LIBC.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    LIBC.mallopt(M_MMAP_MAX, MOST_MAPPED)
    try:
        yield
    finally:
        LIBC.mallopt(M_MMAP_MAX, _most_mapped)


def return_freed_memory() -> None:
    """Return freed memory to the kernel; do nothing with another C library.

    Call it after freeing memory that later tensors cannot reuse: threads that read files have heaps of their own.
    """
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)
