"""Helpers for background asyncio tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from core.errors import CallFailed, RunStopped, UserError
from core.timing.deadlines import ERROR_GRACE_S

T = TypeVar("T")


def start_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a background task whose error may never be retrieved, because another error ended the run."""
    task = asyncio.create_task(work)
    # Otherwise Python prints the unretrieved error, with a traceback below the run's sentence.
    task.add_done_callback(_see_error)
    return task


def _see_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to the end, even if the caller is cancelled meanwhile; CancelledError is raised after it.

    An error of `work` is raised in its place.
    """
    task, cancelled = start_task(work), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result


async def shield_start(start: Coroutine[Any, Any, T], *, end: Callable[[T], Awaitable[object]]) -> T:
    """Return a coroutine's result. On cancellation wait for it, end what it started, then raise CancelledError.

    asyncio's own start of a process, if cancelled, waits until all children of the process have closed their pipes.
    """
    starting = start_task(start)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait({starting})
        if not starting.cancelled() and starting.exception() is None:
            await end(starting.result())
        raise


async def gather_fail_fast(calls: Iterable[Coroutine[Any, Any, T]], *, grace_s: float = ERROR_GRACE_S) -> list[T]:
    """Await all calls; on the first error cancel the others, which would hang in a collective.

    If the error may be a symptom (a broken collective), wait up to `grace_s` for a more specific error and raise that.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        until = time.monotonic() + grace_s
        # Healthy ranks often notice the broken connection before the failing rank has sent its own error.
        while (error := _most_specific(tasks)) and not _names_the_cause(error):
            pending = [task for task in tasks if not task.done()]
            left_s = until - time.monotonic()
            if not pending or left_s <= 0:
                break
            await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if error := _most_specific(tasks):
            raise error
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        # Awaited after the cancel, so that no call is still running when the caller handles the error.
        await asyncio.gather(*tasks, return_exceptions=True)


def _most_specific(tasks: list[asyncio.Task[Any]]) -> BaseException | None:
    """Return the error to report: one that names the cause, otherwise the first in order."""
    failures = [error for task in tasks if task.done() and not task.cancelled() and (error := task.exception())]
    return next(filter(_names_the_cause, failures), failures[0] if failures else None)


def _names_the_cause(error: BaseException) -> bool:
    # CallFailed says only that a call broke: another worker may be the cause.
    return isinstance(error, UserError | RunStopped) and not isinstance(error, CallFailed)
