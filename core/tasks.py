"""Tasks beside others, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def start_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start work whose error its owner may never ask for, because another error ended the run first.

    Python would print that one too, with a traceback below the run's sentence.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(_see_error)
    return task


def _see_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
