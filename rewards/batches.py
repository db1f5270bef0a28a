"""Batches of calls: those that wait at the same time run together, for a reward that computes on a device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Batcher(Generic[T, R]):
    """Queue in front of a function of many items. While a batch runs, the next calls wait and form the next batches."""

    def __init__(self, run: Callable[[list[T]], list[R]], measure: Callable[[T], int], most: int) -> None:
        """run: the function, called in a thread, once at a time. measure: length of an item. most: maximum of a batch,
        its number of items times the longest."""
        self._run, self._measure, self._most = run, measure, most
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._serving: asyncio.Task[None] | None = None

    async def call(self, item: T) -> R:
        """Return the result of an item. Raises the error of the batch."""
        result: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, result))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await result

    async def _serve(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            # those whose callers have given up cost nothing
            waiting = [one for one in waiting if not one[1].done()]
            # all of these before any that come later, or long items would wait for ever
            for batch in self._cut(waiting):
                await self._run_batch(batch)

    def _cut(self, waiting: Sequence[tuple[T, asyncio.Future[R]]]) -> Iterator[list[tuple[T, asyncio.Future[R]]]]:
        """Yield batches of items of similar lengths."""
        batch: list[tuple[T, asyncio.Future[R]]] = []
        for one in sorted(waiting, key=lambda one: self._measure(one[0])):
            if batch and (len(batch) + 1) * self._measure(one[0]) > self._most:
                yield batch
                batch = []
            batch.append(one)
        if batch:
            yield batch

    async def _run_batch(self, batch: Sequence[tuple[T, asyncio.Future[R]]]) -> None:
        try:
            found = await asyncio.to_thread(self._run, [item for item, _ in batch])
        except Exception as error:  # whatever it is: its callers would wait for ever
            for _, result in batch:
                if not result.done():
                    result.set_exception(error)
            return
        for (_, result), value in zip(batch, found, strict=True):
            if not result.done():
                result.set_result(value)
