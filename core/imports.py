"""Imports without the garbage collector.

Importing a large library makes millions of objects that all stay, and the collector walks over them again and again: a
quarter of the time that vLLM's import takes.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def importing() -> Generator[None]:
    """Run the body, which imports, without garbage collection."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
