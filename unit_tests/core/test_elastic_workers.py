"""Ray workers that come and go, with processes that Ray places when a test says so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from core.cluster.elastic_workers import ElasticWorkers
from core.cluster.workers import RankInfo
from core.errors import ProcessDied
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


@pytest.mark.parametrize("closing", ["answers", "fails", "is silent"])
def test_a_worker_is_built_in_its_place_and_leaves_it_for_good(closing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr("ray.kill", lambda actor: done.append(("kill", actor)))

    async def build(*args: Any) -> None:
        done.append(args)

    async def close(method: str) -> None:
        done.append(method)
        await asyncio.sleep(1e9 if closing == "is silent" else 0)
        if closing == "fails":
            raise ActorDiedError

    async def find_free_address() -> tuple[str, int]:
        return "10.0.0.7", 4242

    async def body() -> None:
        actors: list[Waiting] = []
        workers = workers_of(actors, n=1)
        actors[0].node.set_result("a")
        await workers.add_slots(1)
        workers.slots.find_hosts = lambda: done.append("find hosts")
        workers.slots.give_up = lambda rank: done.append(("give up", rank))
        workers.build_worker, workers.args = list, ("the plan",)
        finding = asyncio.create_task(workers.find_place(1))
        await asyncio.sleep(0)
        actor: Any = actors[1]
        actor.node.set_result("b")
        await finding
        assert workers.restarting == {1} and workers.nodes == {0: "a", 1: "b"}
        actor.find_free_address, actor.build = (SimpleNamespace(remote=one) for one in (find_free_address, build))
        await workers.build(1)
        info = RankInfo(rank=1, size=2, address="10.0.0.7", port=4242)
        assert done == ["find hosts", (list, info, ("the plan",))] and workers.restarting == set()

        actor.call = SimpleNamespace(remote=close)
        begin = asyncio.get_running_loop().time()
        await workers.release(1)
        assert asyncio.get_running_loop().time() - begin == pytest.approx(20.0 if closing == "is silent" else 0.0)
        assert done[2:] == ["close", ("kill", actor), ("give up", 1)]
        assert workers.restarting == {1} and workers.nodes == {0: "a"} and workers.actors == [actors[0], None]
        with pytest.raises(ProcessDied, match=r"^engine 1 has left$") as left:
            await workers.start_one(1, list.copy)
        assert left.value.worker == ("engine", 1)

    run_in_virtual_time(body())


def test_no_other_worker_is_asked_about_a_failed_call() -> None:
    async def body() -> None:
        actors: list[Waiting] = []
        workers = workers_of(actors, n=1)
        actors[0].node.set_result("a")
        await workers.add_slots(2)
        for rank in (1, 2):
            with pytest.raises(ProcessDied, match=rf"^engine {rank} has left$"):
                await workers.call_one(rank, list.copy)
            assert [list(peer.ranks) for peer in workers.peers_of(rank)] == [[rank]]

    run_in_virtual_time(body())
