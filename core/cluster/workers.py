"""Workers: objects in this process or in others, called in the same way. Does not import ray.

    trainers: Workers[Trainer]
    await trainers.call_one(0, Trainer.describe_layout)      # one worker
    await trainers.call_all(Trainer.save, folder)            # the same call to every worker; results in rank order
    await trainers.scatter(Trainer.step, shards)             # shards[i] to worker i
    timers: Workers[ActivityTimer] = trainers.attribute("timer")    # an attribute of each worker

A call names the method itself, so "go to definition" and the type checker work across processes. The worker's own class
decides which method of that name runs. `core/cluster/ray_workers.py` implements the interface with Ray actors.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

W_co = TypeVar("W_co", covariant=True)
"""Class of the worker."""
S = TypeVar("S")
"""Type of one worker's shard."""
R = TypeVar("R")
P = ParamSpec("P")


class Workers(Protocol[W_co]):
    """Handle of a group of worker objects of the same class. Methods may be plain or `async`."""

    def __len__(self) -> int: ...

    @overload
    async def call_one(
        self, rank: int, method: Callable[Concatenate[W_co, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...

    @overload
    async def call_one(
        self, rank: int, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a method of worker `rank`."""
        ...

    @overload
    async def call_all(
        self, method: Callable[Concatenate[W_co, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...

    @overload
    async def call_all(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method of every worker with the same arguments; return results in rank order."""
        ...

    async def scatter(
        self,
        method: Callable[Concatenate[W_co, S, P], R],
        shards: Sequence[S],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Call a method of worker i with shards[i] and the arguments; return results in rank order."""
        ...

    async def check_health(self, rank: int) -> tuple[bool, str]:
        """Return whether the worker's process is alive, and a clause about its activity or end."""
        ...

    def attribute(self, name: str) -> Workers[Any]:
        """Return an attribute of every worker, as workers themselves."""
        ...

    def with_deadline(self, timeout_s: float, *, key: str) -> Workers[W_co]:
        """Return the same workers with another deadline of calls, set by the recipe key `key`; inf for none."""
        ...


class Local(Workers[W_co]):
    """Single worker in this process. A breakpoint() in a loss stops in your terminal."""

    def __init__(self, worker: W_co):
        self.worker = worker

    def __len__(self) -> int:
        return 1

    async def call_one(
        self, rank: int, method: Callable[Concatenate[W_co, P], Any], *args: P.args, **kwargs: P.kwargs
    ) -> Any:
        result = getattr(self.worker, method.__name__)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def call_all(
        self, method: Callable[Concatenate[W_co, P], Any], *args: P.args, **kwargs: P.kwargs
    ) -> list[Any]:
        return [await self.call_one(0, method, *args, **kwargs)]

    async def scatter(
        self,
        method: Callable[Concatenate[W_co, S, P], Any],
        shards: Sequence[S],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[Any]:
        # A single worker has a single shard; more would be lost without a word.
        [shard] = shards
        return [await self.call_one(0, method, shard, *args, **kwargs)]

    async def check_health(self, rank: int) -> tuple[bool, str]:
        return True, "runs in this process"

    def attribute(self, name: str) -> Local[Any]:
        return Local(attrgetter(name)(self.worker))

    def with_deadline(self, timeout_s: float, *, key: str) -> Local[W_co]:
        # in one process a call cannot be interrupted
        return self


def copy_to_groups(shards: Sequence[S], n_workers: int) -> list[S]:
    """Assign a shard to each worker; consecutive workers form one group per shard.

    >>> copy_to_groups(["a", "b"], 4)
    ['a', 'a', 'b', 'b']
    """
    size, rest = divmod(n_workers, len(shards))
    if rest or not size:
        raise ValueError(f"{len(shards)} shards are not for groups of the same size of {n_workers} workers")
    return [shard for shard in shards for _ in range(size)]


def first_of_groups(results: list[R], n_groups: int) -> list[R]:
    """Return the result of each group's first worker. All workers of a group have the same result.

    >>> first_of_groups(["a", "a", "b", "b"], 2)
    ['a', 'b']
    """
    return results[:: len(results) // n_groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Rank of one of several equal workers, and the address of their process group."""

    rank: int
    size: int
    address: str
    port: int
