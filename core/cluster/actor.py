"""Ray actor process with one worker; core/cluster/ray_workers.py is the driver's side."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from core.cluster.addresses import listen_at, use_interface_of
from core.cluster.capacity import GPU
from core.cluster.joint_calls import Call
from core.cluster.machine_check import Asked, MachineFacts, collect_facts
from core.cluster.scratch import Scratch, find_scratch, name_shared_memory
from core.cluster.workers import RankInfo
from core.tasks import start_task

IDLE = "is idle"
_STANDARD_LIBRARY = os.path.dirname(os.__file__)


class Actor:
    """Actor process that calls methods of one object by name."""

    def __init__(self, threads: int | None, folder: str = "") -> None:
        """Prepare the process: working folder, threads, temporary folder, network interface.

        threads: compute threads of this process and its children; None: the machine's cores divided by its GPUs.
        folder: the driver's working folder, to which a recipe's paths are relative; "" if this process is in it
        already.
        """
        # Ray tells the libraries of an actor without CPUs to use one.
        self.threads = _share_cores() if threads is None else threads
        if folder and os.path.isdir(folder):
            os.chdir(folder)
        os.environ["OMP_NUM_THREADS"] = str(self.threads)  # of the processes it starts, vLLM's
        self.busy: dict[object, tuple[str, float]] = {}
        """Calls in progress: method and start time."""
        self.begun: dict[int, asyncio.Task[Any]] = {}
        """Calls of `begin_calls` whose answer was not asked for."""
        self.thread = threading.get_ident()
        # On another machine than the driver's, and in a cluster of the user's, nobody has made a folder yet.
        self.scratch = Scratch() if find_scratch() is None else None
        name_shared_memory()
        # Before any process group exists: gloo and NCCL read their variables when they create the first.
        use_interface_of(_node_address())

    def read_node(self) -> str:
        """Return Ray's id of this machine."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def describe_machine(self, asked: Asked) -> MachineFacts:
        """Collect this machine's facts for the driver's comparison, in the first call."""
        return collect_facts(asked)

    def find_free_address(self) -> tuple[str, int]:
        """Return this machine's address and a free port, for a process group."""
        address = _node_address()
        with listen_at(address) as s:
            return address, s.getsockname()[1]

    async def build(self, build: Callable[..., Any], info: RankInfo, args: tuple[Any, ...]) -> None:
        with self._mark_busy("build"):
            torch.set_num_threads(self.threads)  # OpenMP is loaded already
            self.worker = build(info, *args)

    async def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        with self._mark_busy(path):
            # attrgetter follows dots: `Workers.attribute` calls methods of the worker's parts.
            result = attrgetter(path)(self.worker)(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

    async def begin_calls(self, calls: Sequence[Call]) -> None:
        """Begin several calls together. `end_call` returns the answer of each, by number."""
        self.begun |= {number: start_task(self.call(*args, **kwargs)) for number, args, kwargs in calls}

    async def end_call(self, number: int) -> Any:
        return await self.begun.pop(number)

    async def describe_activity(self) -> str:
        """Describe the calls in progress. Runs in a separate thread, so it responds during a call."""
        first: dict[str, float] = {}  # oldest call of each method: there may be a thousand groups
        # A copy, because calls begin and end in another thread meanwhile.
        for method, since in [*self.busy.values()]:
            first.setdefault(method, since)
        calls = [f"has been in {method} for {time.monotonic() - since:.0f} s" for method, since in first.items()]
        place = _place_in_our_code(self.thread)
        return (" and ".join(calls) or IDLE) + (f" (at {place})" if calls and place else "")

    @contextmanager
    def _mark_busy(self, method: str) -> Generator[None]:
        self.thread, call = threading.get_ident(), object()
        self.busy[call] = (method, time.monotonic())
        try:
            yield
        finally:
            del self.busy[call]


def _share_cores() -> int:
    """Return the number of this machine's cores for each of its GPUs."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return divide_cores(ray.nodes(), here, cores=len(os.sched_getaffinity(0)))


def divide_cores(nodes: Sequence[Mapping[str, Any]], here: str, *, cores: int) -> int:
    """Return the cores per GPU of a machine. nodes: Ray's machines. here: id of the machine."""
    [gpus] = [int(node["Resources"].get(GPU, 1)) for node in nodes if node["NodeID"] == here]
    return max(1, cores // gpus)


def _node_address() -> str:
    """Return this machine's address as Ray knows it."""
    import ray

    return ray.util.get_node_ip_address()


def _place_in_our_code(thread: int) -> str:
    """Return the thread's current file and line in this repository or a user's file; "" if there is none."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]: the documented way
    while frame is not None:
        file = frame.f_code.co_filename
        if "site-packages" not in file and not file.startswith((_STANDARD_LIBRARY, "<")):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
