"""Where objects live. The only file that imports ray.

    trainers = await cluster.spawn("trainer", 2, build_trainer, ...)       # Ray actors, one per rank
    await trainers.map("step", arguments)         # arguments[i] to worker i; results in rank order
    await trainers.all("save", folder)            # the same call to every worker
    await rollouts.call(0, "engine.probe", ids)   # one worker, or something it holds

With `Local` there is one worker, it lives in this process, and every call is awaited in place: a
breakpoint() in a loss stops in your terminal, and `up` walks through the trainer to the loop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from core.errors import RunStopped, UserError

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


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


class Remote:
    """The same calls made to Ray actors, each with a deadline."""

    def __init__(self, name: str, actors: list[Any], timeout_s: float):
        self.name, self.actors, self.timeout_s = name, actors, timeout_s

    def __len__(self) -> int:
        return len(self.actors)

    async def build(self, build: Callable[..., Any], *args: Any) -> None:
        """Let actor i hold `build(place, *args)` instead of what it held."""
        address, port = await self.ask(0, "free_address")
        places = [Place(rank=i, size=len(self), address=address, port=port) for i in range(len(self))]
        await together(self.ask(i, "build", build, place, args) for i, place in enumerate(places))

    async def call(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self.ask(rank, "call", method, *args, **kwargs)

    async def map(self, method: str, shards: list[tuple[Any, ...]]) -> list[Any]:
        return await together(self.call(i, method, *args) for i, args in enumerate(shards))

    async def all(self, method: str, *args: Any) -> list[Any]:
        return await together(self.call(i, method, *args) for i in range(len(self)))

    async def ask(self, rank: int, what: str, *args: Any, **kwargs: Any) -> Any:
        """Raises what the method raised; RunStopped naming worker and method if it died or took too long."""
        from ray.exceptions import RayActorError, RayTaskError

        who = f"{self.name} {rank} ({args[0] if what == 'call' else what})"
        try:
            async with asyncio.timeout(self.timeout_s):
                return await getattr(self.actors[rank], what).remote(*args, **kwargs)
        except RayTaskError as error:  # before TimeoutError: it may be one too
            if isinstance(error.cause, UserError | RunStopped):
                raise error.cause from error
            if isinstance(error.cause, TimeoutError):
                raise RunStopped(
                    f"{who} waited in vain, longer than its own deadline (weight_sync.timeout_s)"
                ) from error
            raise
        except TimeoutError as error:
            raise RunStopped(f"{who} did not answer within timeout_s={self.timeout_s:g} seconds") from error
        except RayActorError as error:
            raise RunStopped(f"{who}: its process died; its log is in Ray's session folder") from error


async def together(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All at once; the first that fails ends the wait for the others (they would hang in a collective)."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(c) for c in calls]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [t.result() for t in tasks]


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


class Cluster:
    """A Ray cluster, ours or one that was there, and the actors placed on it by this run."""

    def __init__(self, address: str | None):
        import ray

        os.environ.setdefault("RAY_worker_niceness", "0")
        logging.getLogger("ray").setLevel(logging.ERROR)
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if address is not None:
            _knock(address)
        breakpoint_goes_to = os.environ.get("PYTHONBREAKPOINT", "")
        ray.init(
            address=address or "local",  # None would join whatever Ray runs on this machine
            include_dashboard=False if address is None else None,
            logging_level=logging.ERROR,
            log_to_driver=False,
            configure_logging=False,
        )
        os.environ["PYTHONBREAKPOINT"] = breakpoint_goes_to  # Ray sends it to a debugger of its own, here too
        self.actors: list[Any] = []

    async def spawn(
        self, name: str, n: int, build: Callable[..., Any], *args: Any, resources: Resources, timeout_s: float
    ) -> Remote:
        """Start `n` actors and wait until actor i holds `build(place, *args)`, with its own Place."""
        import ray

        path = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
        env = {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        if resources.threads:
            env["OMP_NUM_THREADS"] = str(resources.threads)
        actor = ray.remote(Actor).options(
            num_gpus=resources.gpus, num_cpus=0, max_concurrency=1000, runtime_env={"env_vars": env}
        )
        workers = Remote(name, [actor.remote() for _ in range(n)], timeout_s)
        self.actors += workers.actors
        await workers.build(build, *args)
        return workers

    def close(self) -> None:
        """End every actor of this run, then our Ray. Called however the run ends."""
        import ray

        for actor in self.actors:
            ray.kill(actor)
        ray.shutdown()


def _knock(address: str) -> None:
    """Raise UserError where nobody listens at host:port; Ray itself would ask again for minutes."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=10):
            pass
    except (OSError, ValueError) as error:
        raise UserError(
            f"ray_address={address}: no Ray cluster answers there ({error}); give the host:port of one that runs, or "
            "leave the key unset"
        ) from error


class Actor:
    """Holds one object in an actor process and calls its methods by name."""

    def free_address(self) -> tuple[str, int]:
        """Where the others can meet this process: its machine's address and a port that is free."""
        import ray

        with socket.socket() as s:
            s.bind(("", 0))
            return ray.util.get_node_ip_address(), s.getsockname()[1]

    async def build(self, build: Callable[..., Any], place: Place, args: tuple[Any, ...]) -> None:
        self.held = build(place, *args)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        result = attrgetter(method)(self.held)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result
