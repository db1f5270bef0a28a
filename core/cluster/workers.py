"""Workers: objects in this process, or in others, that are called in the same way. Nothing here imports ray.

    trainers: Workers[Trainer]
    await trainers.call_one(0, Trainer.describe_layout)      # one worker
    await trainers.call_all(Trainer.save, folder)            # the same call to every worker; results in rank order
    await trainers.scatter(Trainer.step, shards)             # shards[i] to worker i
    timers: Workers[ActivityTimer] = trainers.attribute("timer")    # what each of them holds

A call names the method itself, so an editor's "go to definition" and the type checker cross the process border. The
method that runs is the one of that name of the worker's own class. `core/cluster/ray_workers.py` has the same for Ray
actors.
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
"""Type of one worker's shard of the arguments."""
R = TypeVar("R")
P = ParamSpec("P")


class Workers(Protocol[W_co]):
    """Worker objects of one class, one or more. Methods may be plain or `async`."""

    def __len__(self) -> int: ...

    @overload
    async def call_one(
        self, rank: int, method: Callable[Concatenate[W_co, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...

    @overload
    async def call_one(
        self, rank: int, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call the method of worker `rank`."""
        ...

    @overload
    async def call_all(
        self, method: Callable[Concatenate[W_co, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...

    @overload
    async def call_all(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call the method of every worker with the same arguments; return the results in rank order."""
        ...

    async def scatter(
        self,
        method: Callable[Concatenate[W_co, S, P], R],
        shards: Sequence[S],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Call the method of worker i with shards[i] and the arguments; return the results in rank order."""
        ...

    async def check_health(self, rank: int) -> tuple[bool, str]:
        """Return whether the worker's process lives, and a clause that says what it does or what became of it."""
        ...

    def attribute(self, name: str) -> Workers[Any]:
        """Return the objects that the workers hold under this name, to be called in the same way."""
        ...


class Local(Workers[W_co]):
    """Worker in this process, alone. A breakpoint() in a loss stops in your terminal."""

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
        [shard] = shards
        return [await self.call_one(0, method, shard, *args, **kwargs)]

    async def check_health(self, rank: int) -> tuple[bool, str]:
        return True, "runs in this process"

    def attribute(self, name: str) -> Local[Any]:
        return Local(attrgetter(name)(self.worker))


def copy_to_groups(shards: Sequence[S], n_workers: int) -> list[S]:
    """Return a shard for each worker: neighbours form as many groups as there are shards, and a group gets one.

    >>> copy_to_groups(["a", "b"], 4)
    ['a', 'a', 'b', 'b']
    """
    size, rest = divmod(n_workers, len(shards))
    if rest or not size:
        raise ValueError(f"{len(shards)} shards are not for groups of the same size of {n_workers} workers")
    return [shard for shard in shards for _ in range(size)]


def first_of_groups(results: list[R], n_groups: int) -> list[R]:
    """Return the result of the first worker of each group; the others of the group have the same.

    >>> first_of_groups(["a", "a", "b", "b"], 2)
    ['a', 'b']
    """
    return results[:: len(results) // n_groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Rank of one of several equal workers, and the address where they form their process group."""

    rank: int
    size: int
    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Share of a machine that one worker needs."""

    gpus: int = 0
    threads: int | None = None
    """CPU threads of the worker's tensor library; None leaves the choice to the library."""
    ranks: int = 1
    """Ranks in the worker: 1, or those of a tensor-parallel engine, which are on one machine."""
