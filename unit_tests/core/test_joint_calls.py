"""Calls of an actor that start together: they begin together there, and each has an answer or error of its own."""

import asyncio
from collections.abc import Iterator

import pytest

from core.cluster.capacity import Resources
from core.cluster.ray_workers import Cluster, Remote
from core.cluster.workers import RankInfo
from core.errors import ProcessDied, UserError

pytestmark = pytest.mark.slow


class Meeting:
    """Worker whose calls wait until so many are there."""

    def __init__(self) -> None:
        self.here, self.seen = 0, list[int]()

    async def meet(self, n: int) -> int:
        """The number of calls that had begun before any of them went on."""
        self.here += 1
        self.seen.append(n)
        await asyncio.sleep(0)
        return self.here

    async def double(self, n: int) -> int:
        if n == 3:
            raise UserError("three is refused")
        return 2 * n

    async def wait_for_ever(self) -> None:
        await asyncio.Event().wait()

    async def die(self) -> None:
        import os

        os._exit(1)


def build(info: RankInfo) -> Meeting:
    return Meeting()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(None)
    yield cluster
    cluster.close()


async def start(cluster: Cluster) -> Remote[Meeting]:
    return await cluster.spawn("meeting", 1, build, resources=Resources(threads=1), timeout_s=60.0)


def test_calls_of_one_turn_begin_together_and_later_ones_do_not_wait(cluster):
    async def body() -> None:
        workers = await start(cluster)
        calls = [workers.call_one(0, Meeting.meet, n) for n in range(50)]
        assert await asyncio.gather(*calls) == [50] * 50, "all had begun before the first went on"
        assert await workers.call_one(0, Meeting.meet, 50) == 51
        assert await workers.attribute("seen").call_one(0, list.copy) == [*range(51)], "in their order"

    asyncio.run(body())


def test_each_call_has_an_answer_or_error_of_its_own(cluster):
    async def body() -> None:
        workers = await start(cluster)
        stuck = asyncio.create_task(workers.call_one(0, Meeting.wait_for_ever))
        calls = (workers.call_one(0, Meeting.double, n) for n in range(5))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(a) for a in answers] == ["0", "2", "4", "three is refused", "8"]
        assert isinstance(answers[3], UserError)
        stuck.cancel()
        for turns in range(4):  # given up before they are sent, and after it
            given_up = [asyncio.create_task(workers.call_one(0, Meeting.double, n)) for n in range(4)]
            for _ in range(turns):
                await asyncio.sleep(0)
            given_up[1].cancel()
            answers = await asyncio.gather(*given_up, return_exceptions=True)
            assert [type(a).__name__ for a in answers] == ["int", "CancelledError", "int", "UserError"]

    asyncio.run(body())


def test_the_death_of_the_actor_ends_all_calls(cluster):
    async def body() -> None:
        workers = await start(cluster)
        ask = workers.call_one
        answers = await asyncio.gather(
            *(ask(0, Meeting.wait_for_ever) for _ in range(3)), ask(0, Meeting.die), return_exceptions=True
        )
        assert {type(a) for a in answers} == {ProcessDied}
        after = await asyncio.gather(*(ask(0, Meeting.double, n) for n in range(2)), return_exceptions=True)
        assert {type(a) for a in after} == {ProcessDied}

    asyncio.run(body())
