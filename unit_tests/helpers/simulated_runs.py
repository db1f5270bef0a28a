"""Simulated runs that leave groups out, and schedules drawn by chance."""

from __future__ import annotations

import asyncio
import random

from core.types.samples import Group
from rollouts.scheduling.buffer import Schedule
from tools.benchmarks.simulated_run import SimulatedRun


class Choosy(SimulatedRun):
    """Offloadable some groups out, and steps of its trainer take their time."""

    leaves_out = 0.0
    draw = random.Random(0)

    def accept_group(self, group: Group) -> bool:
        return random.Random(f"kept {group[0].prompt.id}").random() >= self.leaves_out

    async def train(self, groups):
        await asyncio.sleep(self.times.train * 2 * self.draw.random())
        self.steps_done += 1
        return {}


def a_schedule(draw: random.Random) -> Schedule:
    reuse, publish_every = draw.choice([1, 1, 2]), draw.choice([1, 1, 2, 3])
    return Schedule(
        steps=draw.randint(2, 8),
        per_step=reuse * draw.randint(1, 4),
        sync_every=publish_every,
        sample_reuse=reuse,
        max_staleness=publish_every + reuse - 2 + draw.choice([0, 1, 3]),
    )
