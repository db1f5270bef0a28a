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
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from torch.distributed.distributed_c10d import AllreduceOptions

from core.cluster.ray_workers import Remote
from core.cluster.workers import RankInfo
from core.errors import CallFailed, RunStopped, UserError
from core.tasks import gather_fail_fast
from core.timing.clock import Clock
from core.timing.phases import Phase
from core.timing.timeouts import wait_or_cancel
from driver.start.devices import list_cores


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
    from ray.exceptions import RayTaskError

    cause = break_a_collective()
    assert re.match(r"\[.*gloo.*\] ", str(cause))

    async def fail(*_: Any) -> None:
        raise RayTaskError("call", "its traceback", cause).as_instanceof_cause()

    slots: Any = SimpleNamespace(role=SimpleNamespace(name="trainer", n=1), name_worker=lambda rank: f"trainer {rank}")
    workers = Remote[list[int]](slots, lambda rank: SimpleNamespace(call=SimpleNamespace(remote=fail)), 60.0, None)
    with pytest.raises(CallFailed, match=r"^trainer 0 \(copy\) failed: Timed out waiting 20ms for [^\]]+$"):
        asyncio.run(workers.start_one(0, list.copy))
