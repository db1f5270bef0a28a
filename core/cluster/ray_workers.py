"""Workers in Ray actors.

trainers = await cluster.spawn("trainer", 2, build_trainer, ...)       # Ray actors, one per rank
await trainers.scatter(Trainer.step, shards)                           # as in core/cluster/workers.py
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack
from copy import copy
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from core.cluster.actor import Actor
from core.cluster.capacity import Resources, Role
from core.cluster.failures import NO_MEMORY, explain_death, explain_import, is_collective_failure
from core.cluster.joint_calls import JointCalls
from core.cluster.machine_check import MachineCheck, copy_code
from core.cluster.placement import Reservation, WorkerSlots
from core.cluster.private_ray import borrowing_process, check_is_ray, join_ray, refuse_second_ray, start_private_ray
from core.cluster.ray_address import check_reachable
from core.cluster.root_cause import attribute_failure
from core.cluster.scratch import Scratch, find_scratch
from core.cluster.workers import RankInfo, Workers
from core.errors import CallFailed, ProcessDied, RunStopped, UserError, first_line
from core.tasks import gather_fail_fast
from core.timing.deadlines import HEALTH_CHECK_TIMEOUT_S
from core.timing.progress import say

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HEALTH = "health"
"""Ray concurrency group of an actor that responds while the main thread is in a collective."""
MAX_CALLS = 1_000_000
"""Concurrent calls of an actor. Ray queues further calls, and a weight sync would wait behind groups."""
W_co = TypeVar("W_co", covariant=True)
S = TypeVar("S")
P = ParamSpec("P")


class Remote(Workers[W_co]):
    """Workers in Ray actors. Every call has a deadline."""

    def __init__(
        self, slots: WorkerSlots, start_actor: Callable[[int], Any], timeout_s: float, check: MachineCheck | None
    ):
        """check: comparison of the first call on every actor; None on a single machine."""
        self.slots, self.start_actor, self.check = slots, start_actor, check
        self.name, self.timeout_s, self.timeout_key = slots.role.name, timeout_s, "timeout_s"
        self.actors = [start_actor(rank) for rank in range(slots.role.n)]
        self.joint = JointCalls()
        self.ranks: Sequence[int] = range(slots.role.n)
        """Ranks called by `call_all`."""
        self.prefix = ""
        """Path from the worker to the called objects, ending in a dot."""
        self.last_called: dict[int, str] = {}
        """Last called method, by rank."""
        self.started: set[int] = set()
        """Ranks that have completed a call."""
        self.restarting: set[int] = set()
        """Ranks whose actor is being replaced."""
        self.without_run_folder: set[int] = set()
        """Ranks on machines without the run folder, which they do not need."""

    def __len__(self) -> int:
        return len(self.actors)

    def attribute(self, name: str) -> Remote[Any]:
        # A shallow copy shares the list of actors, so that a restarted actor is the new one here too.
        other = copy(self)
        other.prefix = f"{self.prefix}{name}."
        return other

    def with_deadline(self, timeout_s: float, *, key: str) -> Remote[W_co]:
        """Return the same workers with another deadline, set by the recipe key `key`."""
        other = copy(self)
        other.timeout_s, other.timeout_key = timeout_s, key
        return other

    def only(self, ranks: Sequence[int]) -> Remote[W_co]:
        """Return the same workers with `call_all` limited to these ranks, until their actors are replaced."""
        other = copy(self)
        other.ranks, other.actors = ranks, [*self.actors]  # an actor that comes later knows nothing of earlier calls
        return other

    async def build_workers(self, build: Callable[..., Any], *args: Any) -> None:
        """Build the worker of every actor: actor i calls `build(info, *args)` with RankInfo i."""
        self.build_worker, self.args = build, args
        await attribute_failure([self], gather_fail_fast(self._check_machine(i) for i in range(len(self))))
        # Rank 0 hosts the store by which the others find the process group.
        address, port = await attribute_failure([self], self.find_free_address(0))
        infos = [RankInfo(rank=i, size=len(self), address=address, port=port) for i in range(len(self))]
        starts = (self._call_actor(i, "build", build, info, args) for i, info in enumerate(infos))
        await attribute_failure([self], gather_fail_fast(starts))

    async def restart(self, rank: int) -> None:
        """Replace the actor of `rank`, dead or alive, and rebuild the worker. Raises the errors of `build_workers`.

        Only for workers without a process group.
        """
        import ray

        self.restarting.add(rank)
        self.started.discard(rank)
        try:
            ray.kill(self.actors[rank])
            self.actors[rank] = self.start_actor(rank)
            await self.build_again(rank)
        except CallFailed as error:
            raise self.slots.explain_silence(rank, error) from error
        finally:
            self.restarting.discard(rank)

    async def build_again(self, rank: int) -> None:
        """Build the worker of a replacement actor."""
        await self._check_machine(rank)
        self.slots.find_hosts()  # its place may have moved to another machine
        address, port = await self.find_free_address(rank)
        info = RankInfo(rank=rank, size=len(self), address=address, port=port)
        await self._call_actor(rank, "build", self.build_worker, info, self.args)

    async def _check_machine(self, rank: int) -> None:
        """Compare the actor's machine with the driver's, in the first call. Raises UserError if they differ."""
        if self.check is None:
            return
        try:
            facts = await self._call_actor(rank, "describe_machine", self.check.asked)
        except ProcessDied as error:
            if not (why := explain_import(error.__cause__)):
                raise
            raise UserError(f"{self.slots.name_worker(rank)}: {self.check.explain_import(why)}") from error
        if not self.check.sees_run_folder(facts):
            self.without_run_folder.add(rank)
        if difference := self.check.find_difference(facts, self.slots.role):
            raise UserError(f"{self.slots.name_worker(rank)}: its machine {difference}")

    async def find_free_address(self, rank: int) -> tuple[str, int]:
        return await self._call_actor(rank, "find_free_address")

    async def call_one(
        self, rank: int, method: Callable[Concatenate[W_co, P], Any], *args: P.args, **kwargs: P.kwargs
    ) -> Any:
        return await attribute_failure(self.peers_of(rank), self.start_one(rank, method, *args, **kwargs))

    def peers_of(self, rank: int) -> Iterable[Remote[W_co]]:
        """Yield the workers that may cause a failure of this worker's calls."""
        yield self

    async def call_all(
        self, method: Callable[Concatenate[W_co, P], Any], *args: P.args, **kwargs: P.kwargs
    ) -> list[Any]:
        return await attribute_failure([self], gather_fail_fast(self.start_all(method, *args, **kwargs)))

    async def scatter(
        self,
        method: Callable[Concatenate[W_co, S, P], Any],
        shards: Sequence[S],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[Any]:
        path = self._path_of(method)
        calls = (self._call_actor(i, "call", path, shard, *args, **kwargs) for i, shard in enumerate(shards))
        return await attribute_failure([self], gather_fail_fast(calls))

    def start_one(
        self, rank: int, method: Callable[Concatenate[W_co, P], Any], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, Any]:
        """Return the call to one worker as a coroutine, to await with others; see `attribute_failure`."""
        return self._call_actor(rank, "call", self._path_of(method), *args, **kwargs)

    def start_all(
        self, method: Callable[Concatenate[W_co, P], Any], *args: P.args, **kwargs: P.kwargs
    ) -> list[Coroutine[Any, Any, Any]]:
        """Return the same call to every worker as coroutines, to await with others; see `attribute_failure`."""
        return [self.start_one(i, method, *args, **kwargs) for i in self.ranks]

    def submit(self, rank: int, method: Callable[Concatenate[W_co, P], Any], *args: P.args, **kwargs: P.kwargs) -> Any:
        """Start a call and return Ray's reference to the result, which another call can take without a copy here."""
        path = self.last_called[rank] = self._path_of(method)
        return self.actors[rank].call.remote(path, *args, **kwargs)

    def _path_of(self, method: Callable[..., Any]) -> str:
        return self.prefix + method.__name__

    async def _call_actor(self, rank: int, what: str, *args: Any, **kwargs: Any) -> Any:
        """Call method `what` of the actor.

        Raises the worker's own UserError or RunStopped, and other errors with both tracebacks. Raises CallFailed on
        timeout or a broken collective, and ProcessDied.
        """
        from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

        phase = self.last_called[rank] = str(args[0]) if what == "call" else what
        who = f"{self.slots.name_worker(rank)} ({phase})"
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self.joint.call(self.actors[rank], what, *args, **kwargs)
        # First, because Ray also makes it an instance of the worker's own error class, such as TimeoutError.
        except RayTaskError as error:
            # These classes cross the process border as they are: the class decides the exit code and the retry.
            cause: Exception = error.cause
            if isinstance(cause, ProcessDied):
                raise ProcessDied(f"{who}: {cause}", worker=(self.name, rank)) from error
            if isinstance(cause, CallFailed):
                raise type(cause)(f"{who}: {cause}") from error
            if isinstance(cause, UserError | RunStopped):
                raise self.slots.name_machine(rank, cause) from error
            if isinstance(cause, TimeoutError):
                raise CallFailed(
                    f"{who} timed out: it waited longer than its own deadline (weight_sync.timeout_s)"
                ) from error
            if is_collective_failure(cause):
                said = first_line(cause).rpartition("] ")[2]  # gloo begins with the place in its own source
                raise CallFailed(f"{who} failed: {said}") from error
            raise
        except TimeoutError as error:
            raise CallFailed(f"{who} did not answer within {self.timeout_s:g} seconds ({self.timeout_key})") from error
        except RayActorError as error:
            raise ProcessDied(f"{who}: {explain_death(error)}", worker=(self.name, rank)) from error
        except OutOfMemoryError as error:
            raise ProcessDied(f"{who}: {NO_MEMORY}", worker=(self.name, rank)) from error
        except RayError as error:
            raise CallFailed(f"{who} failed: {first_line(error)}") from error
        self.started.add(rank)
        return answer

    async def check_health(self, rank: int) -> tuple[bool, str]:
        """Return whether the process is alive, and a clause about its activity or end."""
        from ray.exceptions import OutOfMemoryError, RayActorError, RayError

        who, phase = self.slots.name_worker(rank), self.last_called.get(rank, "start")
        try:
            # Its own concurrency group: a live process responds even while its main thread is in a collective.
            async with asyncio.timeout(min(self.timeout_s, HEALTH_CHECK_TIMEOUT_S)):
                activity = await self.actors[rank].describe_activity.options(concurrency_group=HEALTH).remote()
        except RayActorError as error:
            return False, f"{who} ({phase}): {explain_death(error)}"
        except OutOfMemoryError:
            return False, f"{who} ({phase}): {NO_MEMORY}"
        except RayError as error:
            return False, f"{who} ({phase}): it cannot be reached: {first_line(error)}"
        except TimeoutError:
            if rank not in self.started:
                return (
                    False,
                    f"{who} did not start within {self.timeout_s:g} seconds ({self.timeout_key}): has Ray room for it?",
                )
            why = "it is stopped or stuck, or its machine is gone"
            return False, f"{who} ({phase}): its process gives no sign of life: {why}"
        return True, f"{who} {activity}"


R = TypeVar("R", bound=Remote[Any])


def _environment() -> dict[str, str]:
    """Return the environment variables of every actor; PYTHONPATH includes this repository."""
    path = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}


class Cluster:
    """Ray cluster, private or existing, and this run's actors on it."""

    def __init__(self, address: str | None, *, ship_code: bool = False):
        refuse_second_ray()
        if address is not None:
            check_reachable(address)
            check_is_ray(address)
        self.is_private = address is None
        with ExitStack() as leaving:
            if find_scratch() is None:  # no run has one
                leaving.enter_context(Scratch())
            leaving.enter_context(borrowing_process())
            self._connect(address, ship_code=ship_code)
            self.leaving = leaving.pop_all()
            """Callbacks that restore this process's state after Ray's shutdown."""
        self.groups: list[Remote[Any]] = []
        """All spawned workers, ended by `close`."""
        self.slots: dict[str, WorkerSlots] = {}
        self.check: MachineCheck | None = None

    def _connect(self, address: str | None, *, ship_code: bool) -> None:
        breakpoint_goes_to = os.environ.get("PYTHONBREAKPOINT", "")
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
        if address is None:
            start_private_ray(cast(Path, find_scratch()), _environment(), **quiet)
        else:
            shipped = {"working_dir": str(copy_code(cast(Path, find_scratch())))} if ship_code else None
            join_ray(address, runtime_env=shipped, **quiet)
        os.environ["PYTHONBREAKPOINT"] = breakpoint_goes_to  # Ray sets its own debugger, in this process too

    async def reserve(self, roles: Sequence[Role], *, timeout_s: float, say: Callable[[str], None] = say) -> None:
        """Reserve a slot for every actor before the first starts. Raises UserError if the cluster is too small."""
        self.slots |= await Reservation(roles).wait(timeout_s=timeout_s, say=say)

    async def spawn(
        self, name: str, n: int, build: Callable[..., Any], *args: Any, resources: Resources, timeout_s: float
    ) -> Remote[Any]:
        """Start `n` actors and build their workers: actor i calls `build(info, *args)` with RankInfo i."""
        return await self.spawn_as(Remote[Any], name, n, build, *args, resources=resources, timeout_s=timeout_s)

    async def spawn_as(
        self,
        kind: type[R],
        name: str,
        n: int,
        build: Callable[..., Any],
        *args: Any,
        resources: Resources,
        timeout_s: float,
    ) -> R:
        import ray

        if name not in self.slots:
            await self.reserve([Role(name=name, n=n, resources=resources)], timeout_s=timeout_s)
        slots = self.slots.pop(name)
        remote: Any = ray.remote
        actor = remote(concurrency_groups={HEALTH: 1})(Actor)
        # a private cluster has processes ready; with a runtime environment each actor would wait for a new one
        environment = None if self.is_private else {"env_vars": _environment()}
        # num_cpus=0: placement groups hold the reservation. Asking again would count every CPU twice.
        options = {"num_gpus": resources.gpus, "num_cpus": 0, "max_concurrency": MAX_CALLS, "runtime_env": environment}
        folder = "" if self.is_private else os.getcwd()

        def start_actor(rank: int) -> Any:
            slot = actor.options(**options, scheduling_strategy=slots.strategy_of(rank))
            return slot.remote(resources.threads, folder)

        workers = kind(slots, start_actor, timeout_s, self.check)
        # Registered before the build, so that `close` also kills actors whose build fails.
        self.groups.append(workers)
        await workers.build_workers(build, *args)
        return workers

    def close(self) -> None:
        """Kill every actor of this run, then shut down Ray. Called however the run ends."""
        import ray

        with self.leaving:
            for group in self.groups:
                for actor in filter(None, group.actors):
                    ray.kill(actor)
            ray.shutdown()
