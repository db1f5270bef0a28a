"""Where objects live. The only file that imports ray.

    trainers = await cluster.spawn("trainer", 2, build_trainer, ...)       # Ray actors, one per rank
    await trainers.map("step", arguments)         # arguments[i] to worker i; results in rank order
    await trainers.all("save", folder)            # the same call to every worker
    await rollouts.call(0, "engine.probe", ids)   # one worker, or something it holds

With `Local` there is one worker, it lives in this process, and every call is awaited in place: a
breakpoint() in a loss stops in your terminal, and `up` walks through the trainer to the loop.

Where a remote call fails, its whole group is asked for signs of life before anything is said: who notices
a dead or stopped process first is one of its peers, in a collective, and the sentence must name the culprit.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import contextmanager
from copy import copy
from operator import attrgetter
from typing import Any

from core.errors import CallFailed, ProcessDied, RunStopped, UserError, first_line
from core.workers import Place, Resources, T, together

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STANDARD_LIBRARY = os.path.dirname(os.__file__)
WATCH = "watch"
"""Ray's name for the thread of an actor that answers while its main one is in a collective."""
PULSE_S = 10.0
"""A process that says nothing on that thread for so long gives no sign of life."""
MAX_CALLS = 1_000_000
"""That an actor answers at a time. Beyond, Ray lets calls wait in line: a sync would wait behind groups of samples."""
IDLE = "is idle"


class Remote:
    """The same calls made to Ray actors, each with a deadline."""

    def __init__(self, name: str, actors: list[Any], timeout_s: float):
        self.name, self.actors, self.timeout_s, self.key = name, actors, timeout_s, "timeout_s"
        self.asked: dict[int, str] = {}
        """By rank, the last method that was called."""
        self.started: set[int] = set()

    def __len__(self) -> int:
        return len(self.actors)

    def within(self, timeout_s: float, *, key: str) -> Remote:
        """The same workers under another deadline, which the configuration calls `key`."""
        other = copy(self)
        other.timeout_s, other.key = timeout_s, key
        return other

    async def build(self, build: Callable[..., Any], *args: Any) -> None:
        """Let actor i hold `build(place, *args)` instead of what it held."""
        address, port = await blaming([self], self.ask(0, "free_address"))
        places = [Place(rank=i, size=len(self), address=address, port=port) for i in range(len(self))]
        asks = (self.ask(i, "build", build, place, args) for i, place in enumerate(places))
        await blaming([self], together(asks))

    async def call(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        return await blaming([self], self.ask(rank, "call", method, *args, **kwargs))

    async def map(self, method: str, shards: list[tuple[Any, ...]]) -> list[Any]:
        return await blaming([self], together(self.ask(i, "call", method, *args) for i, args in enumerate(shards)))

    async def all(self, method: str, *args: Any) -> list[Any]:
        return await blaming([self], together(self.calls(method, *args)))

    def calls(self, method: str, *args: Any) -> list[Coroutine[Any, Any, Any]]:
        """The same call to every worker, to be awaited with others; see `blaming`."""
        return [self.ask(i, "call", method, *args) for i in range(len(self))]

    def refer(self, rank: int, method: str, *args: Any) -> Any:
        """Start a call; returns what stands for its result among the arguments of another, with no copy here."""
        self.asked[rank] = method
        return self.actors[rank].call.remote(method, *args)

    async def ask(self, rank: int, what: str, *args: Any, **kwargs: Any) -> Any:
        """Raises UserError and RunStopped as the method did, and any other of its errors with both tracebacks;
        CallFailed where an answer did not come in time or a collective broke; ProcessDied."""
        from ray.exceptions import RayActorError, RayError, RayTaskError

        phase = str(args[0]) if what == "call" else what
        who = f"{self.name} {rank} ({phase})"
        self.asked[rank] = phase
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await getattr(self.actors[rank], what).remote(*args, **kwargs)
        except RayTaskError as error:  # before TimeoutError: it may be one too
            cause: Exception = error.cause
            if isinstance(cause, CallFailed | ProcessDied):
                raise type(cause)(f"{who}: {cause}") from error
            if isinstance(cause, UserError | RunStopped):
                raise cause from error
            if isinstance(cause, TimeoutError):
                raise CallFailed(
                    f"{who} waited in vain, longer than its own deadline (weight_sync.timeout_s)"
                ) from error
            if _broke_off(cause):
                said = first_line(cause).rpartition("] ")[2]  # gloo begins with the place in its own source
                raise CallFailed(f"{who} failed: {said}") from error
            raise
        except TimeoutError as error:
            raise CallFailed(f"{who} did not answer within {self.timeout_s:g} seconds ({self.key})") from error
        except RayActorError as error:
            raise ProcessDied(f"{who}: its process died; its log is in Ray's session folder") from error
        except RayError as error:
            raise CallFailed(f"{who} failed: {first_line(error)}") from error
        self.started.add(rank)
        return answer

    async def pulse(self, rank: int) -> tuple[bool, str]:
        """Does the process live, and a clause that says what it does or what became of it."""
        from ray.exceptions import RayActorError

        who, phase = f"{self.name} {rank}", self.asked.get(rank, "start")
        try:
            async with asyncio.timeout(min(self.timeout_s, PULSE_S)):
                doing = await self.actors[rank].doing.options(concurrency_group=WATCH).remote()
        except RayActorError:
            return False, f"{who} ({phase}): its process died; its log is in Ray's session folder"
        except TimeoutError:
            if rank not in self.started:
                return (
                    False,
                    f"{who} did not start within {self.timeout_s:g} seconds ({self.key}): has Ray room for it?",
                )
            why = "it is stopped or stuck, or its machine is gone"
            return False, f"{who} ({phase}): its process gives no sign of life: {why}"
        return True, f"{who} {doing}"


def _broke_off(error: BaseException) -> bool:
    """Is it a collective that lost a member, or waited in vain? gloo says so in a plain RuntimeError."""
    from torch.distributed import DistError

    return isinstance(error, DistError | ConnectionError) or (type(error) is RuntimeError and "gloo" in str(error))


async def blaming(groups: Iterable[Remote], call: Awaitable[T]) -> T:
    """Await `call`; where it fails because a process of `groups` died or is stopped, raise ProcessDied naming it."""
    from ray.exceptions import RayTaskError

    try:
        return await call
    except (CallFailed, RayTaskError) as error:
        pulses = await asyncio.gather(*(group.pulse(rank) for group in groups for rank in range(len(group))))
        if lost := [clause for alive, clause in pulses if not alive]:
            raise ProcessDied(lost[0]) from error
        if isinstance(error, CallFailed):
            busy = [clause for _, clause in pulses if not clause.endswith(IDLE)]
            raise type(error)(error.what, ", ".join(busy)) from error
        raise


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
        of_ray: Any = importlib.import_module("ray._private.worker")
        of_ray._worker_logs_enabled = False  # else it tells of a death in a paragraph of its own
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
        remote: Any = ray.remote
        actor = remote(concurrency_groups={WATCH: 1})(Actor).options(
            num_gpus=resources.gpus, num_cpus=0, max_concurrency=MAX_CALLS, runtime_env={"env_vars": env}
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

    def __init__(self) -> None:
        self.busy: dict[object, tuple[str, float]] = {}
        """Calls in progress: method and when it began."""
        self.thread = threading.get_ident()

    def free_address(self) -> tuple[str, int]:
        """Where the others can meet this process: its machine's address and a port that is free."""
        import ray

        with socket.socket() as s:
            s.bind(("", 0))
            return ray.util.get_node_ip_address(), s.getsockname()[1]

    async def build(self, build: Callable[..., Any], place: Place, args: tuple[Any, ...]) -> None:
        with self._busy("build"):
            self.held = build(place, *args)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self._busy(method):
            result = attrgetter(method)(self.held)(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

    async def doing(self) -> str:
        """A clause on the calls in progress. It runs in a thread of its own, and so answers during any of them."""
        first: dict[str, float] = {}  # of each method: there may be a thousand groups
        for method, since in [*self.busy.values()]:
            first.setdefault(method, since)
        calls = [f"has been in {method} for {time.monotonic() - since:.0f} s" for method, since in first.items()]
        place = _place_in_our_code(self.thread)
        return (" and ".join(calls) or IDLE) + (f" (at {place})" if calls and place else "")

    @contextmanager
    def _busy(self, method: str) -> Generator[None]:
        self.thread, call = threading.get_ident(), object()
        self.busy[call] = (method, time.monotonic())
        try:
            yield
        finally:
            del self.busy[call]


def _place_in_our_code(thread: int) -> str:
    """The file and line where a thread is, in this repository or in a file of the user's; nothing while it waits."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]: the documented way
    while frame is not None:
        file = frame.f_code.co_filename
        if "site-packages" not in file and not file.startswith((_STANDARD_LIBRARY, "<")):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
