"""State and schedules of the algorithm in a run: moved after each step, logged, and restored from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from algs.base import Algorithm
from algs.state import StepSeen
from core import metrics as names
from core.cluster.workers import Workers
from core.errors import UserError
from core.types.arrays import from_json, to_json
from core.types.episodes import prepare_credit
from core.types.samples import Group
from driver.checkpoint import Checkpoint
from trainers.trainer import Trainer

A = TypeVar("A", bound=Algorithm)


async def move_algorithm(alg: A, trainers: Workers[Trainer], groups: list[Group], measured: Mapping[str, float]) -> A:
    """Return the algorithm of the next step, which the trainers have from now on too.

    groups: of the finished step, with advantages. measured: means of the trainers' metrics.
    """
    if "loss" in measured:
        moved = alg.after(StepSeen(number=alg.step_number, groups=prepare_credit(groups)[0], means=measured))
    else:  # every update was skipped, so nothing was measured
        moved = alg.with_state(alg.state, step=alg.step_number + 1)
    await trainers.call_all(Trainer.set_algorithm, moved)
    return moved


async def restore_algorithm(alg: A, trainers: Workers[Trainer], checkpoint: Checkpoint | None) -> A:
    """Return the algorithm of the first step to run, which the trainers have too.

    Raises UserError for a checkpoint without the state that the algorithm begins with.
    """
    if checkpoint is None:
        return alg
    state = from_json(checkpoint.state.alg_state)
    if lacking := sorted(alg.state.keys() - state.keys()):
        raise UserError(
            f"the checkpoint {checkpoint.folder} has no {lacking[0]} in the state of the algorithm: leave resume out "
            "to start again"
        )
    restored = alg.with_state(state, step=checkpoint.state.steps_done)
    await trainers.call_all(Trainer.set_algorithm, restored)
    return restored


def state_to_json(alg: Algorithm) -> dict[str, Any]:
    """Return the state of an algorithm as JSON; `from_json` restores it to the bit."""
    return to_json(dict(alg.state))


def measure_algorithm(alg: Algorithm) -> dict[str, float]:
    """Return the numbers of the state and the scheduled hyper-parameters, for the log."""
    # a slash would begin another part of the metric's name
    state = {name.replace("/", "."): value for name, value in alg.state.items() if isinstance(value, float)}
    return {names.ALG_STATE.format(name): value for name, value in state.items()} | {
        names.ALG_SCHEDULED.format(name): value for name, value in alg.scheduled_values().items()
    }
