"""Calls that are awaited together, seconds that add up, and the share of a machine that a worker gets."""

from __future__ import annotations

import asyncio
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    OutOfMemoryError,
    RayError,
    RaySystemError,
    RayTaskError,
)
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from torch.distributed.distributed_c10d import AllreduceOptions

from core.cluster.failures import DIED, GONE, NO_MEMORY
from core.cluster.ray_workers import Remote
from core.cluster.workers import RankInfo
from core.errors import CallFailed, ProcessDied, RunStopped, TransportFailed, UserError
from core.tasks import gather_fail_fast
from core.timing.clock import Clock
from core.timing.phases import Phase
from core.timing.timeouts import wait_or_cancel
from driver.start.devices import list_cores
from tools.benchmarks.simulated_run import run_in_virtual_time


async def after(seconds: float, outcome: BaseException | int) -> int:
    await asyncio.sleep(seconds)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def test_results_come_in_the_order_of_the_calls():
    assert asyncio.run(gather_fail_fast([after(0.02, 1), after(0.0, 2)])) == [1, 2]
    assert asyncio.run(gather_fail_fast([])) == []


@pytest.mark.parametrize("cause", [UserError("the key"), RunStopped("the reason")])
def test_an_error_that_names_the_cause_is_told_and_not_its_symptom(cause):
    """A broken collective is seen first by the ranks that did nothing wrong."""
    calls = [after(0.0, CallFailed("a collective broke")), after(0.05, cause), after(60.0, 1)]
    with pytest.raises(type(cause), match=str(cause)):
        asyncio.run(asyncio.wait_for(gather_fail_fast(calls, grace_s=20.0), 30))
    both = [after(0.0, CallFailed("a collective broke")), after(0.0, cause)]
    with pytest.raises(type(cause), match=str(cause)):
        asyncio.run(gather_fail_fast(both))


def test_a_lone_symptom_is_told_after_the_grace_and_the_rest_is_cancelled():
    cancelled = []

    async def hangs() -> int:
        try:
            return await after(60.0, 1)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(CallFailed, match="broke"):
        asyncio.run(asyncio.wait_for(gather_fail_fast([hangs(), after(0.0, CallFailed("broke"))], grace_s=0.1), 30))
    assert cancelled == [True]


def test_a_timeout_is_none_and_one_of_the_call_itself_is_an_error():
    assert asyncio.run(wait_or_cancel(after(60.0, 1), 0.01)) is None
    assert asyncio.run(wait_or_cancel(after(0.0, 1), 30.0)) == 1
    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(wait_or_cancel(after(0.0, TimeoutError("its own")), 30.0))


def test_phases_and_the_rest_add_up_to_the_step():
    clock = Clock()
    with clock.phase(Phase.TRAIN):
        assert clock.current_phase == Phase.TRAIN
        time.sleep(0.02)
    assert clock.current_phase == ""
    time.sleep(0.02)
    lap = clock.start_lap()
    assert lap["time/train_s"] >= 0.02 and lap["time/rest_s"] >= 0.02
    assert lap["time/train_s"] + lap["time/rest_s"] == pytest.approx(lap["time/step_s"])
    with pytest.raises(ValueError), clock.phase(Phase.TRAIN):
        raise ValueError
    again = clock.start_lap()
    assert again["time/train_s"] < 0.02 <= clock.total["train"], "a lap begins anew, a total does not"
    totals = clock.get_totals()
    assert totals["train"] + totals["rest"] == pytest.approx(totals["all"])


def test_engines_of_one_machine_share_its_cores_without_overlap(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 4, 6, 8})
    infos = [RankInfo(rank=rank, size=2, address="", port=0) for rank in range(2)]
    assert [list_cores(info) for info in infos] == [[0, 2], [4, 6, 8]]
    assert list_cores(None) == [0, 2, 4, 6, 8]
    for size, cores in ((5, [6]), (6, [0, 2, 4, 6, 8])):  # with more engines than cores, each has all
        assert list_cores(RankInfo(rank=3, size=size, address="", port=0)) == cores


def break_a_collective() -> RuntimeError:
    """Return what gloo raises on a rank whose peer does not come."""
    main, timeout = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), timedelta(seconds=20)

    def join(rank: int) -> ProcessGroupGloo:
        store = main if rank == 0 else TCPStore("127.0.0.1", main.port, is_master=False)
        return ProcessGroupGloo(PrefixStore("ranks", store), rank, 2, timeout)

    with ThreadPoolExecutor() as ranks:
        first, _peer = ranks.map(join, range(2))
    how = AllreduceOptions()
    how.timeout = timedelta(milliseconds=20)
    with pytest.raises(RuntimeError) as broken:
        first.allreduce([torch.zeros(1)], how).wait()
    return broken.value


def test_a_broken_collective_is_told_without_the_place_in_gloos_source():
    cause = break_a_collective()
    assert re.match(r"\[.*gloo.*\] ", str(cause))

    async def fail(*_: Any) -> None:
        raise RayTaskError("call", "its traceback", cause).as_instanceof_cause()

    slots: Any = SimpleNamespace(role=SimpleNamespace(name="trainer", n=1), name_worker=lambda rank: f"trainer {rank}")
    workers = Remote[list[int]](slots, lambda rank: SimpleNamespace(call=SimpleNamespace(remote=fail)), 60.0, None)
    with pytest.raises(CallFailed, match=r"^trainer 0 \(copy\) failed: Timed out waiting 20ms for [^\]]+$"):
        asyncio.run(workers.start_one(0, list.copy))


def raised_there(cause: Exception) -> Exception:
    """Return what Ray raises here for an error of the actor's own."""
    return RayTaskError("call", "its traceback", cause).as_instanceof_cause()


def trainers_of(error: Exception, *states: str | Exception | None) -> Remote[list[int]]:
    """Return workers whose calls end with `error`. states: what each answers to a health check; None: nothing."""

    async def answer(said: str | Exception | None) -> str:
        await asyncio.sleep(1e9 if said is None else 0)
        if isinstance(said, str):
            return said
        raise said or error

    def start_actor(rank: int) -> SimpleNamespace:
        asked = SimpleNamespace(remote=lambda: answer(states[rank]))
        described = SimpleNamespace(options=lambda concurrency_group: asked)
        return SimpleNamespace(call=SimpleNamespace(remote=lambda *_: answer(error)), describe_activity=described)

    slots: Any = SimpleNamespace(
        role=SimpleNamespace(name="trainer", n=len(states)),
        name_worker=lambda rank: f"trainer {rank} on node{rank}",
        name_machine=lambda rank, error: type(error)(f"on node{rank}: {error}"),
    )
    return Remote[list[int]](slots, start_actor, 60.0, None)


STORE_LOST = RaySystemError("the object store is lost\nmore", "")
LOST = ActorUnavailableError("the connection is lost", None)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (raised_there(ProcessDied("engine 0: it died", worker=("engine", 0))), ProcessDied, ": engine 0: it died"),
        (raised_there(TransportFailed("no answer", "busy")), TransportFailed, ": no answer; busy"),
        (
            raised_there(TimeoutError()),
            CallFailed,
            " timed out: it waited longer than its own deadline (weight_sync.timeout_s)",
        ),
        (raised_there(ConnectionError("a peer left")), CallFailed, " failed: a peer left"),
        (ActorDiedError(), ProcessDied, f": {DIED}"),
        (LOST, ProcessDied, f": {GONE}"),
        (OutOfMemoryError("9 of 9 GiB"), ProcessDied, f": {NO_MEMORY}"),
        (STORE_LOST, CallFailed, " failed: System error: the object store is lost"),
    ],
)
def test_a_failed_call_names_its_worker_and_what_happened(error: Exception, kind: type[RunStopped], said: str):
    workers = trainers_of(error, "is idle", "is idle")
    with pytest.raises(RunStopped) as failed:
        asyncio.run(workers.start_one(1, list.copy))
    assert (type(failed.value), str(failed.value)) == (kind, f"trainer 1 on node1 (copy){said}")
    assert getattr(failed.value, "worker", ("trainer", 1)) == ("trainer", 1) and failed.value.__cause__ is error
    assert workers.started == set()


def test_errors_of_the_workers_own_code_come_as_they_are():
    for cause in (UserError("the key"), RunStopped("the reason")):
        with pytest.raises(type(cause), match=f"^on node1: {cause}$"):
            asyncio.run(trainers_of(raised_there(cause), "is idle", "is idle").start_one(1, list.copy))
    error = raised_there(ValueError("a bug"))
    with pytest.raises(ValueError, match="its traceback") as failed:
        asyncio.run(trainers_of(error, "is idle").call_one(0, list.copy))
    assert failed.value is error, "with both tracebacks"


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("is idle", " is idle"),
        (ActorDiedError(), f" (copy): {DIED}"),
        (LOST, f" (copy): {GONE}"),
        (OutOfMemoryError("9 of 9 GiB"), f" (copy): {NO_MEMORY}"),
        (STORE_LOST, " (copy): it cannot be reached: System error: the object store is lost"),
        (
            None,
            " (copy): its process gives no sign of life: it is stopped or stuck, or its machine is gone",
        ),
    ],
)
def test_the_health_of_a_worker_is_a_clause(state: str | RayError | None, said: str):
    workers = trainers_of(STORE_LOST, "is idle", state)
    workers.last_called[1] = "copy"
    workers.started.add(1)
    assert run_in_virtual_time(workers.check_health(1)) == (state == "is idle", f"trainer 1 on node1{said}")


def test_the_worker_that_died_is_named_before_the_one_that_noticed():
    def told(workers: Remote[list[int]]) -> tuple[type, str, object]:
        with pytest.raises(RunStopped) as failed:
            run_in_virtual_time(workers.call_one(0, list.copy))
        return type(failed.value), str(failed.value), getattr(failed.value, "worker", None)

    noticed = raised_there(ConnectionError("a peer left"))
    busy = "has been in step for 9 s"
    workers = trainers_of(noticed, "is idle", busy, OutOfMemoryError(""), ActorDiedError())
    of_dead = f"trainer 2 on node2 (start): {NO_MEMORY}"
    assert told(workers) == (ProcessDied, of_dead, ("trainer", 2))
    workers.restarting |= {1, 3}
    assert told(workers) == (ProcessDied, of_dead, ("trainer", 2)), "before those that are restarted"
    workers.restarting |= {1, 2, 3}
    assert told(workers) == (ProcessDied, "trainer 1 is being restarted", ("trainer", 1))
    workers = trainers_of(noticed, "is idle", busy, f"{busy} again")
    seen = f"trainer 1 on node1 {busy}, trainer 2 on node2 {busy} again"
    assert told(workers) == (CallFailed, f"trainer 0 on node0 (copy) failed: a peer left; {seen}", None)
