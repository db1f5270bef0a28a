"""vLLM's second process, EngineCore, started before vLLM asks for it; on a CPU.

As vLLM starts it, an engine is three processes: ours, EngineCore and a worker per rank. Each is started from the one
before by spawn, so that its import, which takes most of the start, happens three times one after the other. Here it
happens twice, at the same time:

    EarlyCore()            starts a process that imports what EngineCore and worker need, while ours imports vLLM
    with core.in_place():  where vLLM would now start EngineCore, it gives the work to that process instead
    in that process        a single worker computes in it, which saves messages for every token; several workers
                           are forked, as vLLM itself does outside of Ray where it has GPUs

With a GPU nothing of this is used: no process may be forked after CUDA is in use.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from core.errors import ProcessDied
from core.gc_control import without_gc
from core.lean_imports import SCIPY, lean_transformers, without_package
from core.replacing import replacing

CORES = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's variable: the cores of every rank, as 0,1|2,3."""


class EarlyCore(SpawnProcess):
    """Process that imports vLLM when it is made, and gets its work when vLLM calls `start`."""

    def __init__(self) -> None:
        work, to_child = Pipe(duplex=False)
        super().__init__(target=_import_and_wait, args=(work,), name="EngineCore")
        super().start()
        work.close()
        self._to_child = to_child  # only now: the child waits for its end, and must not hold a copy

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Let vLLM start this process for its EngineCore. Without work after the body, the process ends."""
        from vllm.v1.engine import utils

        try:
            with replacing(utils, get_mp_context=lambda: _Context(self)):
                yield
        finally:
            self._to_child.close()

    def set_work(self, target: Callable[..., None], kwargs: Mapping[str, Any]) -> None:
        """Keep what `start` shall send: a function and its arguments."""
        self._work = (target, kwargs)

    def start(self) -> None:
        """Send the work, with this environment, which vLLM has changed since the process began."""
        try:
            self._to_child.send((dict(os.environ), *self._work))
        except BrokenPipeError as error:
            raise ProcessDied("vLLM's EngineCore died while it imported vLLM") from error


def computes_in_core() -> bool:
    """Tell whether EngineCore is the only worker too: there is one rank."""
    return "|" not in os.environ[CORES]


class _Context(SpawnContext):
    """Context of multiprocessing whose only process has begun already."""

    def __init__(self, early: EarlyCore) -> None:
        self._early = early

    def Process(self, *, target: Callable[..., None], name: str, kwargs: Mapping[str, Any]) -> EarlyCore:
        self._early.set_work(target, kwargs)
        return self._early


@lean_transformers()
def _import_and_wait(work: Connection) -> None:
    with without_gc(), without_package(SCIPY):
        import vllm.v1.engine.core
        import vllm.v1.executor.multiproc_executor
        import vllm.v1.worker.cpu_worker  # noqa: F401

        import rollouts.engines.vllm_support.worker  # noqa: F401
    try:
        environment, target, kwargs = work.recv()
    except EOFError:  # vLLM refused its settings, or our parent is gone
        return
    work.close()
    # what is set a second time moves, and the process could no longer change its title
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
    if computes_in_core():
        _compute_on(os.environ[CORES])
    else:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        _prepare_forks()
    gc.freeze()  # else vLLM's full collections, in this process and in its workers, walk over all that was imported
    target(**kwargs)


def _prepare_forks() -> None:
    """Let every process forked from this one end with it, and compute on the cores that vLLM chose for it."""
    from rollouts.engines.vllm_support.plugin import end_with

    core = os.getpid()

    def begin_worker() -> None:
        end_with(core)
        if cores := os.environ.get("GOMP_CPU_AFFINITY"):
            _compute_on(cores.replace(" ", ","))

    os.register_at_fork(after_in_child=begin_worker)


def _compute_on(cores: str) -> None:
    """Let this process compute on these cores, one thread on each.

    OpenMP read its variables when the process began; no parallel region has run yet, so it still obeys.
    """
    import torch

    numbers = [int(core) for core in cores.split(",")]
    os.sched_setaffinity(0, numbers)
    torch.set_num_threads(len(numbers))


def preload_openmp() -> None:
    """Put torch's OpenMP into LD_PRELOAD, as vLLM does for the processes that it starts: it is read at their birth."""
    import torch

    preloaded = os.environ.get("LD_PRELOAD", "")
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if found and not any(name in preloaded for name in ("libgomp", "libiomp", "libomp")):
        os.environ["LD_PRELOAD"] = f"{preloaded}:{found[0]}" if preloaded else str(found[0])
