"""Python's garbage collector, out of the way where much is made that stays.

It looks through all objects again and again: through the rows of a data set, which hold no circles, and through the
millions of objects of a large library, where it takes a quarter of the time of vLLM's import.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

SELDOM = (50_000, 100, 10)
"""Thresholds of the collector in a driver; Python's own are (700, 10, 10)."""


@contextmanager
def collecting_seldom(is_wanted: bool) -> Generator[None]:
    """Let the collector look more seldom while the body runs, and never at what is there before it.

    A driver holds the requests and groups of a step, up to millions of objects without circles. Looking through them
    takes a third of its own time. This is for a process without tensors: those in circles are freed later.
    """
    before = gc.get_threshold()
    if is_wanted:
        gc.freeze()
        gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        if is_wanted:
            gc.unfreeze()
            gc.set_threshold(*before)


@contextmanager
def without_gc() -> Generator[None]:
    """Run the body without garbage collection."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
