"""Workers: objects in this process or elsewhere, behind one interface. Nothing here imports ray."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol, TypeVar

from core.errors import CallFailed, RunStopped, UserError

LAST_WORDS_S = 2.0
"""After a failure the others have so long to fail as well: one of them may know better why."""
T = TypeVar("T")


class Workers(Protocol):
    def __len__(self) -> int: ...
    async def call(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any: ...
    async def map(self, method: str, shards: list[tuple[Any, ...]]) -> list[Any]: ...
    async def all(self, method: str, *args: Any) -> list[Any]: ...


class Local:
    """One object in this process, behind the interface of many elsewhere."""

    def __init__(self, worker: Any):
        self.worker = worker

    def __len__(self) -> int:
        return 1

    async def call(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        result = attrgetter(method)(self.worker)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def map(self, method: str, shards: list[tuple[Any, ...]]) -> list[Any]:
        [args] = shards
        return [await self.call(0, method, *args)]

    async def all(self, method: str, *args: Any) -> list[Any]:
        return [await self.call(0, method, *args)]


async def together(calls: Iterable[Coroutine[Any, Any, Any]], *, last_words_s: float = LAST_WORDS_S) -> list[Any]:
    """All at once; the first that fails ends the wait for the others (they would hang in a collective).

    Where its reason may lie with another, the others have `last_words_s` to fail with a better one.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        until = time.monotonic() + last_words_s
        while (worst := _worst(tasks)) and not _is_certain(worst):
            pending = [task for task in tasks if not task.done()]
            left_s = until - time.monotonic()
            if not pending or left_s <= 0:
                break
            await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if worst := _worst(tasks):
            raise worst
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _worst(tasks: list[asyncio.Task[Any]]) -> BaseException | None:
    """The failure to tell of: one that is certain, else the first in order."""
    failures = [error for task in tasks if task.done() and not task.cancelled() and (error := task.exception())]
    return next(filter(_is_certain, failures), failures[0] if failures else None)


def _is_certain(error: BaseException) -> bool:
    """Has whoever raised it named the reason?"""
    return isinstance(error, UserError | RunStopped) and not isinstance(error, CallFailed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which of several equal workers this is, and where they meet."""

    rank: int
    size: int
    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one worker asks of the machine it is placed on."""

    gpus: int = 0
    threads: int | None = None
    """CPU threads of its tensor library; None leaves them to it."""
