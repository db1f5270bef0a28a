"""Actor process that holds one worker. It runs on Ray; the driver's end is in core/cluster/ray_workers.py."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from core.cluster.addresses import listen_at, use_interface_of
from core.cluster.machine_check import Asked, MachineFacts, collect_facts
from core.cluster.scratch import Scratch, find_scratch, name_shared_memory
from core.cluster.workers import RankInfo

IDLE = "is idle"
_STANDARD_LIBRARY = os.path.dirname(os.__file__)


class Actor:
    """Actor process that holds one object and calls its methods by name."""

    def __init__(self, threads: int | None, folder: str = "") -> None:
        """Begin in the driver's working folder, by which the paths of a recipe go, where this machine has it.

        threads: threads that this process and those it starts compute with; None leaves it to the libraries.
        folder: the driver's working folder; "" where it is this process's too.
        """
        self.threads = threads
        if folder and os.path.isdir(folder):
            os.chdir(folder)
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(threads)  # of the processes it starts, vLLM's
        self.busy: dict[object, tuple[str, float]] = {}
        """Calls in progress: method and start time."""
        self.thread = threading.get_ident()
        # On another machine than the driver's, and in a cluster of the user's, nobody has made a folder yet.
        self.scratch = Scratch() if find_scratch() is None else None
        name_shared_memory()
        use_interface_of(_node_address())

    def read_node(self) -> str:
        """Return Ray's id of this machine."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def describe_machine(self, asked: Asked) -> MachineFacts:
        """Return what the driver compares with its own machine, before anything else is called."""
        return collect_facts(asked)

    def find_free_address(self) -> tuple[str, int]:
        """Return the address of this machine and a free port, where other processes can meet this one."""
        address = _node_address()
        with listen_at(address) as s:
            return address, s.getsockname()[1]

    async def build(self, build: Callable[..., Any], info: RankInfo, args: tuple[Any, ...]) -> None:
        with self._mark_busy("build"):
            if self.threads is not None:  # OpenMP is loaded already, and Ray told it to use one
                torch.set_num_threads(self.threads)
            self.worker = build(info, *args)

    async def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        with self._mark_busy(path):
            result = attrgetter(path)(self.worker)(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

    async def describe_activity(self) -> str:
        """Describe the calls in progress. This runs in a thread of its own, so it returns during any of them."""
        first: dict[str, float] = {}  # oldest call of each method: there may be a thousand groups
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


def _node_address() -> str:
    """Return the address that Ray gives this machine."""
    import ray

    return ray.util.get_node_ip_address()


def _place_in_our_code(thread: int) -> str:
    """Return file and line where a thread is, in this repository or in the user's file; "" while it waits."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]: the documented way
    while frame is not None:
        file = frame.f_code.co_filename
        if "site-packages" not in file and not file.startswith((_STANDARD_LIBRARY, "<")):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
