"""Runs without engines: a sampler chooses the rows, and groups finish in a random order."""

import asyncio
import json
import random
from dataclasses import replace

from core.types.samples import Group, Prompt
from data_feeds.feed import Feed, Source
from data_feeds.rows.mixture import Mixture
from data_feeds.samplers.find import find_sampler
from rollouts.scheduling.buffer import FinishedGroup, ReplayBuffer, Schedule
from rollouts.scheduling.sampled_rows import SampledRows
from tools.benchmarks.simulated_run import answer

STEPS = 12
SYNC = Schedule(steps=STEPS, per_step=4)
OVERLAP = Schedule(steps=STEPS, per_step=4, max_staleness=2)
REUSE = Schedule(steps=STEPS, per_step=4, max_staleness=3, sample_reuse=2, sync_every=2)


def make_feed(*sizes: int) -> Feed[Prompt]:
    sources = [
        Source(name=f"s{d}", items=[Prompt(id=f"{d}/{row}", messages=[]) for row in range(rows)], stream=f"0/s{d}")
        for d, rows in enumerate(sizes)
    ]
    return Feed(sources=sources, mixture=Mixture((2, 1)[: len(sizes)]))


def roll_out(ticket: int, prompt: Prompt) -> Group:
    """A group whose rewards depend on ticket and row alone; rows differ in difficulty."""
    rng, difficulty = random.Random(f"{ticket}/{prompt.id}"), random.Random(prompt.id).random()
    return [replace(answer(ticket, 0), prompt=prompt, reward=float(rng.random() < difficulty)) for _ in range(4)]


def make_rows(schedule: Schedule, sizes: tuple[int, ...], sampler: object) -> SampledRows:
    _, found = find_sampler(sampler)
    return SampledRows(make_feed(*sizes), found, per_block=schedule.fresh, max_staleness=schedule.max_staleness)


def play(
    schedule: Schedule, sampler: object, *, seed: int, sizes: tuple[int, ...] = (30,), resumes: bool = False
) -> tuple[dict[int, str], list[dict[str, float]]]:
    """Run all steps with groups that finish in a random order. Return the row of each ticket, and the metrics."""
    order, rows, metrics = random.Random(seed), dict[int, str](), list[dict[str, float]]()

    async def run() -> None:
        buffer = ReplayBuffer(schedule, sampled=make_rows(schedule, sizes, sampler))
        for step in range(schedule.steps):
            buffer = await run_step(buffer, step)

    async def run_step(buffer: ReplayBuffer, step: int) -> ReplayBuffer:
        sampled = buffer.sampled
        assert sampled is not None
        if resumes:
            state = json.loads(json.dumps(buffer.get_state()))
            sampled = make_rows(schedule, sizes, sampler)
            version = buffer.version
            buffer = ReplayBuffer.from_state(state, schedule, sampled.draw, step=step, sampled=sampled)
            buffer.version = version
        running = dict[int, Prompt]() if resumes or step == 0 else buffer_running[0]
        buffer_running[0] = running

        async def start() -> None:
            while True:
                ticket = await buffer.reserve_ticket()
                running[ticket] = sampled.draw(ticket)
                assert rows.setdefault(ticket, running[ticket].id) == running[ticket].id

        starting = asyncio.create_task(start())
        waiting = asyncio.create_task(buffer.next_step_groups(step))
        while True:
            for _ in range(4):
                await asyncio.sleep(0)
            if waiting.done():
                break
            ticket = order.choice(sorted(running))  # a deadlock is an error here: nothing to choose from
            group = roll_out(ticket, running.pop(ticket))
            accepted = 0 < sum(s.reward or 0 for s in group) < 4
            buffer.add_group(FinishedGroup(ticket=ticket, group=group, accepted=accepted, seconds=1.0))
        starting.cancel()
        await asyncio.wait([starting])
        _, drawn = waiting.result()
        metrics.append(sampled.measure([d.ticket for d in drawn]))
        sampled.forget(buffer.lowest_ticket)
        if schedule.needs_sync(step + 1, version=buffer.version, kl=None):
            buffer.set_version(step + 1)
        return buffer

    buffer_running = [dict[int, Prompt]()]
    asyncio.run(run())
    return rows, metrics
