"""Colocation: trainers and engines alternate on the same devices (placement: colocate).

Every step goes through this cycle of states. Each arrow is a call with a deadline, timed as the phase written on it:

    generating --sleep--> engines asleep --reload--> training --offload--> optimizer away --wake--> weights awake
         ^                                                                                               |
         +--sync (proof)-- cache awake <--wake-- trainers away <--offload-- published <---sync (send)----+

With a judge on the same devices, the engines sleep before the rewards, and the judge has a turn for itself. It sleeps
before the trainers are reloaded, or before the engines wake again for more groups:

    generating --sleep--> engines asleep --wake--> judging --sleep--> engines asleep

The engine's weights wake before the trainer's are offloaded, because they are loaded from the trainer. By then the
optimizer is offloaded, the largest part of a trainer. The KV cache, the largest part of an engine, wakes last.

Only the driver knows the state. Calls out of order that would touch missing memory are refused by
rollouts/engines/sleeping.py and trainers/offload/offloaded_trainer.py, on a CPU as on a GPU.
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from configs.schema import RLConfig
from core.cluster.ray_workers import Remote
from core.cluster.workers import Workers
from core.errors import CallFailed, ProcessDied, RunStopped
from core.timing.clock import Clock
from core.timing.deadlines import SYNC_TIMEOUT_GRACE_S
from core.timing.phases import Phase
from driver.start.devices import judge_takes_turns
from driver.start.judges import Judges
from rollouts.scheduling.judge_turns import JudgeTurns
from rollouts.worker import RolloutWorker
from trainers.offload.offloaded_trainer import OffloadedTrainer
from trainers.trainer import Trainer
from trainers.weight_sync.base import WeightSync

T = TypeVar("T")


class ColocationState(StrEnum):
    """State of colocated devices, in the order of the cycle."""

    GENERATING = "generating"
    ENGINES_ASLEEP = "engines asleep"
    TRAINING = "training"
    OPTIMIZER_AWAY = "optimizer away"
    WEIGHTS_AWAKE = "weights awake"
    PUBLISHED = "published"
    TRAINERS_AWAY = "trainers away"
    CACHE_AWAKE = "cache awake"
    JUDGING = "judging"


CYCLE = tuple(state for state in ColocationState if state is not ColocationState.JUDGING)
"""States of every step. A judge's turn lies between two moments of ENGINES_ASLEEP."""


@dataclass
class Colocation:
    """State machine of the devices that trainers and engines share."""

    trainers: Workers[OffloadedTrainer]
    engines: Workers[RolloutWorker]
    sleepers: Workers[RolloutWorker]
    """Engine handles with a longer deadline: falling asleep may wait for running groups."""
    weights: WeightSync
    clock: Clock
    turn: ColocationState = ColocationState.GENERATING
    judges: Judges | None = None
    """Judge that takes turns with both."""

    async def give_to_trainers(self) -> None:
        """Put the engines to sleep, unless the judge had the last turn, and reload the trainers."""
        trainers, sleepers = self.trainers, self.sleepers
        if self.turn is not ColocationState.ENGINES_ASLEEP:
            await self._enter(ColocationState.ENGINES_ASLEEP, Phase.SLEEP, sleepers.call_all(RolloutWorker.sleep))
        await self._enter(ColocationState.TRAINING, Phase.RELOAD, trainers.call_all(OffloadedTrainer.reload_states))

    async def give_to_engines(self, version: int) -> dict[str, float]:
        """Publish the weights as `version`, offload the trainers and wake the engines; return the sync metrics."""
        enter, trainers, engines, weights = self._enter, self.trainers, self.engines, self.weights
        offloading = trainers.call_all(OffloadedTrainer.offload_states)
        await enter(ColocationState.OPTIMIZER_AWAY, Phase.OFFLOAD, offloading)
        await enter(ColocationState.WEIGHTS_AWAKE, Phase.WAKE, engines.call_all(RolloutWorker.wake, part="weights"))
        sent = await enter(ColocationState.PUBLISHED, Phase.SYNC, weights.deliver_weights(version))
        offloading = trainers.call_all(OffloadedTrainer.offload_weights)
        await enter(ColocationState.TRAINERS_AWAY, Phase.OFFLOAD, offloading)
        await enter(ColocationState.CACHE_AWAKE, Phase.WAKE, engines.call_all(RolloutWorker.wake, part="kv_cache"))
        return await enter(ColocationState.GENERATING, Phase.SYNC, weights.prove_weights(sent))

    async def begin_judging(self) -> None:
        """Put the engines to sleep and wake the judge. The driver waits for groups meanwhile, and times no phase."""
        assert self.judges is not None
        if self.turn is not ColocationState.ENGINES_ASLEEP:
            await self._enter(ColocationState.ENGINES_ASLEEP, None, self.sleepers.call_all(RolloutWorker.sleep))
        await self._enter(ColocationState.JUDGING, None, self.judges.wake(), before=ColocationState.ENGINES_ASLEEP)

    async def end_judging(self) -> None:
        """Put the judge to sleep. The devices are free then, for trainers or engines."""
        assert self.judges is not None
        await self._enter(ColocationState.ENGINES_ASLEEP, None, self.judges.sleep(), before=ColocationState.JUDGING)

    async def resume_engines(self) -> None:
        """Wake the engines after a judge's turn, with the weights that they had; if they are awake, do nothing."""
        if self.turn is ColocationState.GENERATING:
            return
        call = self._wake_engines()
        await self._enter(ColocationState.GENERATING, None, call, before=ColocationState.ENGINES_ASLEEP)

    async def _wake_engines(self) -> None:
        await self.engines.call_all(RolloutWorker.wake, part="weights")
        await self.engines.call_all(RolloutWorker.wake, part="kv_cache")

    async def _enter(
        self,
        after: ColocationState,
        phase: Phase | None,
        call: Coroutine[Any, Any, T],
        *,
        before: ColocationState | None = None,
    ) -> T:
        """Await the call that leads to the state `after`. Raises RunStopped if the current state is not the one before.

        phase: what the driver's clock charges; None beside another phase. call: a coroutine that has not started yet.
        before: the state before, if it is not that of the cycle.
        """
        # the states are a cycle: index -1 of the first is the last
        before = before or CYCLE[CYCLE.index(after) - 1]
        if self.turn is not before:
            # Python would warn of a coroutine that is never awaited.
            call.close()
            raise RunStopped(
                f"colocation is in state '{self.turn}'; expected '{before}' before switching to '{after}': call "
                "next_groups, train and sync_weights in the order of main_rl.py"
            )
        try:
            with nullcontext() if phase is None else self.clock.phase(phase):
                result = await call
        except ProcessDied as error:
            raise ProcessDied(f"between '{before}' and '{after}', {error}", worker=error.worker) from error
        except CallFailed as error:
            raise type(error)(f"between '{before}' and '{after}', {error}") from error
        # Only after success: a failed switch leaves the device in no known state, and the run ends.
        self.turn = after
        return result


def make_colocation(
    cfg: RLConfig,
    trainers: Workers[Trainer],
    engines: Workers[RolloutWorker],
    weights: WeightSync,
    clock: Clock,
    judges: Judges | None,
) -> Colocation:
    """Return the colocation state machine, for offloaded trainers, awake engines and a sleeping judge."""
    away: Workers[OffloadedTrainer] = trainers.attribute("offloaded")
    # Engines fall asleep only after their groups have ended, which takes longer than a step of a sync.
    sleepers = engines
    if isinstance(engines, Remote) and isinstance(away, Remote):
        # In one process a call cannot be interrupted, so only remote workers have a deadline.
        deadline_s, key = cfg.weight_sync.timeout_s + SYNC_TIMEOUT_GRACE_S, "weight_sync.timeout_s"
        away, engines = away.with_deadline(deadline_s, key=key), engines.with_deadline(deadline_s, key=key)
    shared = judges if judge_takes_turns(cfg) else None
    return Colocation(trainers=away, engines=engines, sleepers=sleepers, weights=weights, clock=clock, judges=shared)


def make_judge_turns(colocation: Colocation | None) -> JudgeTurns | None:
    """Return the turns of a judge; None if the judge shares no device."""
    return None if colocation is None or colocation.judges is None else JudgeTurns(colocation)


async def offload_after_start(trainers: Workers[Trainer]) -> list[str]:
    """Offload new trainers, before the engines measure free memory; return the GPUs of every rank."""
    away: Workers[OffloadedTrainer] = trainers.attribute("offloaded")
    await away.call_all(OffloadedTrainer.offload_states)
    await away.call_all(OffloadedTrainer.offload_weights)
    return await away.call_all(OffloadedTrainer.name_devices)
