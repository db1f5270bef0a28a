"""Switch off or slow down Python's garbage collector while many lasting objects are created.

The collector traverses all objects repeatedly: rows of a data set, which contain no cycles, or millions of objects of a
large library. It takes a quarter of vLLM's import time.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

SELDOM = (50_000, 100, 10)
"""Collector thresholds in a driver; Python's defaults are (700, 10, 10)."""
ENGINE = (20_000, 50, 10)
"""Collector thresholds in an engine's process, where a tensor in a cycle must not wait for long."""


def collect_seldom() -> None:
    """Run the collector rarely in an engine's process from now on, and never on the objects that exist.

    Thousands of requests are alive at once, each of many objects without cycles. With Python's defaults, traversing
    them took more of the event loop's time than all else.
    """
    gc.collect()
    _collect_seldom(ENGINE)


@contextmanager
def collecting_seldom(is_wanted: bool) -> Generator[None]:
    """Run the collector rarely during the body, and never on objects that existed before.

    A driver stores up to millions of requests and samples per step, without cycles. Traversing them takes a third of
    the driver's time. Use it only in a process without tensors: tensors in cycles are freed later.
    """
    before = gc.get_threshold()
    if is_wanted:
        _collect_seldom(SELDOM)
    try:
        yield
    finally:
        if is_wanted:
            gc.unfreeze()
            gc.set_threshold(*before)


def _collect_seldom(thresholds: tuple[int, int, int]) -> None:
    # Frozen objects are exempt from collection, so the heap of the imports is never traversed again.
    gc.freeze()
    gc.set_threshold(*thresholds)


@contextmanager
def without_gc() -> Generator[None]:
    """Disable garbage collection during the body."""
    # A caller may have switched it off already; then it stays off afterwards.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
