"""Ray workers that come and go, with processes that Ray places when a test says so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from core.cluster.elastic_workers import ElasticWorkers
from tools.benchmarks.simulated_run import run_in_virtual_time


class Waiting:
    """Handle of an actor that answers nothing until it is placed, and then only where."""

    def __init__(self) -> None:
        self.node: asyncio.Future[str] = asyncio.Future()
        self.read_node = SimpleNamespace(remote=lambda: self.node)
        silent = SimpleNamespace(remote=lambda: asyncio.Future[str]())
        self.describe_activity = SimpleNamespace(options=lambda concurrency_group: silent)


def workers_of(actors: list[Waiting], *, n: int) -> ElasticWorkers[Any]:
    """Return engines whose actors are noted when they are started."""

    def start_actor(rank: int) -> Waiting:
        actors.append(Waiting())
        return actors[-1]

    slots: Any = SimpleNamespace(role=SimpleNamespace(name="engine", n=n), name_worker=lambda rank: f"engine {rank}")
    return ElasticWorkers(slots, start_actor, 60.0, None)


def test_the_next_process_of_a_slot_waits_for_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[Waiting] = []
    monkeypatch.setattr("ray.kill", killed.append)

    async def body() -> None:
        actors: list[Waiting] = []
        workers = workers_of(actors, n=1)
        actors[0].node.set_result("a")
        await workers.add_slots(1)
        for rank, node, is_same in ((0, "a", True), (0, "b", False), (1, "b", False), (1, "b", True), (0, "a", False)):
            finding = asyncio.create_task(workers.find_place(rank))
            await asyncio.sleep(1000.0)
            said = f"engine {rank} did not start within 60 seconds (timeout_s): has Ray room for it?"
            assert await workers.check_health(rank) == (False, said)
            actors[-1].node.set_result(node)
            assert await finding is is_same and workers.nodes[rank] == node
        assert killed == [actors[0], actors[1], actors[3], actors[2]]

    run_in_virtual_time(body())


def test_a_slot_without_a_process_is_not_alive() -> None:
    async def body() -> None:
        actors: list[Waiting] = []
        workers = workers_of(actors, n=1)
        actors[0].node.set_result("a")
        await workers.add_slots(2)
        assert [await workers.check_health(rank) for rank in (1, 2)] == [
            (False, "engine 1 has left"),
            (False, "engine 2 has left"),
        ]

    run_in_virtual_time(body())
