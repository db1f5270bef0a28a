"""Schedule and buffer in tables: which groups may start, when weights are synced, what a checkpoint keeps."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from core.types.samples import Prompt
from rollouts.scheduling.buffer import FinishedGroup, ReplayBuffer, Schedule
from tools.benchmarks.simulated_run import answer
from unit_tests.helpers.sampled_play import make_rows
from unit_tests.helpers.sentences import tell


def test_a_group_may_start_when_the_last_step_that_uses_it_is_near_enough():
    for steps, reuse, fresh, staleness in itertools.product((1, 3, 5), (1, 2, 3), (1, 2), (0, 1, 3)):
        schedule = Schedule(steps=steps, per_step=fresh * reuse, sample_reuse=reuse, max_staleness=staleness)
        assert schedule.fresh == fresh
        uses: dict[int, list[int]] = {}
        for step in range(steps):
            window = schedule.window(step)
            assert len(window) == fresh * reuse and window.start == step * fresh
            for position in window:
                uses.setdefault(position, []).append(step)
        for position, version in itertools.product(range((steps + reuse) * fresh + 2), range(steps + 1)):
            # the last window's groups would be used on, if the run did not end
            last = position // fresh
            assert position not in uses or uses[position][-1] == min(last, steps - 1)
            may_start = position in uses and last - version <= staleness
            assert schedule.may_start(position, version=version) == may_start


def test_weights_are_synced_at_the_latest_after_every_steps_and_at_the_end():
    schedule = Schedule(steps=9, per_step=1, sync_every=3, max_kl=0.5)
    at = {
        (done, version): schedule.needs_sync(done, version=version, kl=None)
        for done in range(1, 10)
        for version in range(done)
    }
    assert {pair for pair, needs in at.items() if needs} == {(d, v) for d, v in at if d - v >= 3 or d == 9}
    drift = [schedule.needs_sync(1, version=0, kl=kl) for kl in (0.0, 0.5, 0.500001, 9.0)]
    assert drift == [False, False, True, True]
    assert not replace(schedule, max_kl=None).needs_sync(1, version=0, kl=9.0)
    assert not replace(schedule, max_kl=0.0).needs_sync(1, version=0, kl=0.0)


def finished(ticket: int, accepted: bool = True) -> FinishedGroup:
    return FinishedGroup(ticket=ticket, group=[answer(ticket, 0)], accepted=accepted, seconds=0.5 + ticket)


async def try_now(work: Coroutine[Any, Any, Any]) -> Any:
    """Return what a call returns at once, or None if it waits."""
    task = asyncio.ensure_future(work)
    for _ in range(3):
        await asyncio.sleep(0)
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
        return None
    return task.result()


async def reserve_all(buffer: ReplayBuffer) -> list[int]:
    """Reserve the tickets that may start."""
    found: list[int] = []
    while (ticket := await try_now(buffer.reserve_ticket())) is not None:
        found.append(ticket)
    return found


def test_rejected_groups_are_replaced_after_a_round_or_at_once():
    """Without staleness a round ends first; with staleness 1 each rejected group makes place."""

    async def body() -> None:
        buffer = ReplayBuffer(Schedule(steps=3, per_step=3))
        assert await reserve_all(buffer) == [0, 1, 2]
        for ticket, rest in ((1, 0), (0, 1)):
            buffer.add_group(finished(ticket, accepted=ticket == 0))
            assert (await reserve_all(buffer), buffer.n_collected, buffer.lowest_ticket) == ([], rest, 0)
        buffer.add_group(finished(2))
        assert await reserve_all(buffer) == [3] and buffer.n_collected == 2
        assert await try_now(buffer.next_step_groups(0)) is None
        buffer.add_group(finished(3))
        groups, drawn = await try_now(buffer.next_step_groups(0))
        assert [g[0].prompt.id for g in groups] == ["0", "2", "3"] and [d.ticket for d in drawn] == [0, 1, 2, 3]
        assert (buffer.lowest_ticket, buffer.n_collected, await reserve_all(buffer)) == (4, 0, [])
        buffer.set_version(1)
        assert await reserve_all(buffer) == [4, 5, 6]

        buffer = ReplayBuffer(Schedule(steps=3, per_step=3, max_staleness=1))
        assert await reserve_all(buffer) == [0, 1, 2, 3, 4, 5]
        buffer.add_group(finished(4, accepted=False))
        assert await reserve_all(buffer) == [6]
        buffer.add_group(finished(5))
        assert (await reserve_all(buffer), buffer.n_collected, buffer.lowest_ticket) == ([], 1, 0)

    asyncio.run(body())


def test_a_step_gives_up_after_twenty_rejected_groups_for_each_it_needs():

    async def body() -> None:
        buffer = ReplayBuffer(Schedule(steps=9, per_step=2, max_staleness=2))
        for n in range(41):
            ticket = await buffer.reserve_ticket()
            assert ticket == n
            if n == 40:
                assert await try_now(buffer.next_step_groups(0)) is None
            buffer.add_group(finished(ticket, accepted=ticket == 7))
        groups, drawn = await try_now(buffer.next_step_groups(0))
        assert [g[0].prompt.id for g in groups] == ["7"] and [d.ticket for d in drawn] == [*range(41)]
        assert (buffer.n_collected, buffer.lowest_ticket, len(buffer.ready)) == (0, 41, 0)

    asyncio.run(body())


def test_a_reused_group_is_drawn_once_and_leaves_after_its_last_step():
    async def body() -> None:
        buffer = ReplayBuffer(Schedule(steps=4, per_step=4, sample_reuse=2, max_staleness=3))
        rejected = {1, 4, 6}
        for ticket in range(11):
            assert await buffer.reserve_ticket() == ticket
            buffer.add_group(finished(ticket, accepted=ticket not in rejected))
        found = []
        for step in range(3):
            lowest, collected = buffer.lowest_ticket, buffer.n_collected
            groups, drawn = await buffer.next_step_groups(step)
            found.append(([g[0].prompt.id for g in groups], [d.ticket for d in drawn], lowest, collected))
        assert found == [
            (["0", "2", "3", "5"], [0, 1, 2, 3, 4, 5], 0, 8),
            (["3", "5", "7", "8"], [6, 7, 8], 3, 6),
            (["7", "8", "9", "10"], [9, 10], 7, 4),
        ]
        assert (buffer.lowest_ticket, buffer.n_collected) == (9, 2)

    asyncio.run(body())


def test_a_ticket_that_is_not_running_is_refused():
    async def body() -> None:
        buffer = ReplayBuffer(Schedule(steps=1, per_step=2))
        await buffer.reserve_ticket()
        for ticket in (1, 0):
            if ticket == 0:
                buffer.add_group(finished(0))
            said = tell(partial(buffer.add_group, finished(ticket)), RuntimeError)
            assert said == f"ticket {ticket} was not started, or finished twice"
        assert buffer.n_collected == 1

    asyncio.run(body())


def test_a_checkpoint_has_the_tickets_that_run_and_the_groups_that_wait():
    async def body() -> None:
        schedule = Schedule(steps=9, per_step=2, max_staleness=1)
        buffer = ReplayBuffer(schedule, step=2, ticket=5)
        assert await reserve_all(buffer) == [5, 6, 7, 8]
        for ticket in (8, 5):
            buffer.add_group(finished(ticket, accepted=ticket == 8))
        state = buffer.get_state()
        rest = {name: state[name] for name in state if name != "finished"}
        assert rest == {"ticket": 9, "started": [6, 7], "n_reported": 0, "images": {}}
        told = [(one["ticket"], one["accepted"], one["seconds"]) for one in state["finished"]]
        assert told == [(5, False, 5.5), (8, True, 8.5)]
        again = ReplayBuffer.from_state(state, schedule, lambda t: Prompt(id=f"row {t}", messages=[]), step=2)
        assert again.get_state() == state and [g.group[0].prompt.id for g in again.ready] == ["row 5"]
        assert (again.n_collected, again.lowest_ticket, again.version) == (1, 5, 2)
        # those that ran, then new ones: one more, because of the rejected group
        assert await reserve_all(again) == [6, 7, 9]
        empty = ReplayBuffer.from_state(ReplayBuffer(schedule, ticket=3).get_state(), schedule, lambda t: None, step=0)
        assert empty.lowest_ticket == 3 and await empty.reserve_ticket() == 3

    asyncio.run(body())


def test_all_that_wait_are_served_and_one_that_gives_up_takes_nothing():
    async def body() -> None:
        buffer = ReplayBuffer(Schedule(steps=3, per_step=2))
        assert await reserve_all(buffer) == [0, 1]
        waiting = [asyncio.create_task(buffer.reserve_ticket()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        for ticket in (0, 1):
            buffer.add_group(finished(ticket))
        await buffer.next_step_groups(0)
        buffer.set_version(1)
        assert await asyncio.gather(*waiting[1:]) == [2, 3] and waiting[0].cancelled()

    asyncio.run(body())


def test_a_ticket_whose_row_depends_on_a_running_group_waits_for_it():
    """Tickets 6 and 7 depend on the results of 0 and 1, and come up because four groups are rejected."""

    async def body() -> None:
        schedule = Schedule(steps=9, per_step=2, max_staleness=1)
        sampled = make_rows(schedule, (30,), "uniform")
        buffer = ReplayBuffer(schedule, sampled=sampled)
        for tickets in ([0, 1, 2, 3], [4, 5]):
            assert await reserve_all(buffer) == tickets
            for ticket in tickets:
                sampled.draw(ticket)
            for ticket in tickets[-2:]:
                buffer.add_group(finished(ticket, accepted=False))
        assert await reserve_all(buffer) == []
        buffer.add_group(finished(1))
        assert await reserve_all(buffer) == []
        waiting = asyncio.create_task(buffer.reserve_ticket())
        await asyncio.sleep(0)
        buffer.add_group(finished(0))
        assert await waiting == 6 and await reserve_all(buffer) == [7]
        assert sampled.draw(6).id != sampled.draw(7).id

    asyncio.run(body())


@pytest.mark.parametrize(
    ("started", "done", "lowest", "ready"),
    [([4], [5, 6], 4, []), ([5], [4, 6], 5, [4]), ([], [4, 5, 6], 7, [4, 5, 6]), ([4, 5, 6], [], 4, [])],
)
def test_a_restored_buffer_waits_for_the_lowest_ticket_that_is_not_there(started, done, lowest, ready):
    schedule = Schedule(steps=9, per_step=2, max_staleness=2)
    finished_ones = [{"ticket": t, "accepted": True, "seconds": 1.0, "group": [], "prompts": []} for t in done]
    state = {"ticket": 7, "started": started, "n_reported": 0, "images": {}, "finished": finished_ones}
    buffer = ReplayBuffer.from_state(state, schedule, lambda t: Prompt(id=f"{t}", messages=[]), step=2)
    assert (buffer.next_ready, [one.ticket for one in buffer.ready]) == (lowest, ready)
    assert (buffer.n_collected, buffer.position, buffer.version) == (len(done), 4, 2)
