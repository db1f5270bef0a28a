"""Names of what takes time: phases of the driver, activities of a device. Each is declared here and nowhere else."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Phases of the driver. It is in one phase at a time, so a step is the sum of its phases and REST."""

    START = "start"
    RESUME = "resume"
    WAIT_FOR_DATA = "wait_for_data"
    CHECK = "check"
    LOGP = "logp"
    ADVANTAGES = "advantages"
    TRAIN = "train"
    CAPTURE = "capture"
    SYNC = "sync"
    SLEEP = "sleep"
    RELOAD = "reload"
    OFFLOAD = "offload"
    WAKE = "wake"
    EVALUATE = "evaluate"
    LOG = "log"
    CHECKPOINT = "checkpoint"
    SAVE = "save"
    CLOSE = "close"


class Activity(StrEnum):
    """Activities of a trainer rank or an engine."""

    TRAIN = "train"
    LOGP = "logp"
    SYNC = "sync"
    SAVE = "save"
    GENERATE = "generate"
    ENVIRONMENT = "environment"
    REWARD = "reward"
    RESTART = "restart"
    SLEEP = "sleep"
    WAKE = "wake"
    OFFLOAD = "offload"
    RELOAD = "reload"


TRAINER_ACTIVITIES = (Activity.TRAIN, Activity.LOGP, Activity.SYNC, Activity.SAVE)
ENGINE_ACTIVITIES = (Activity.SYNC, Activity.GENERATE, Activity.ENVIRONMENT, Activity.REWARD)
TURN_PHASES = (Phase.SLEEP, Phase.RELOAD, Phase.OFFLOAD, Phase.WAKE)
"""Phases in which a shared device changes hands, with placement: colocate."""
TRAINER_TURNS = (Activity.OFFLOAD, Activity.RELOAD)
ENGINE_TURNS = (Activity.SLEEP, Activity.WAKE)
"""Activities of devices then."""
IDLE = "idle"
"""A device's time in none of its activities."""
REST = "rest"
"""Time that no phase or activity explains."""
STEP = "step"
"""The whole of a step."""


def time_metric(phase: str) -> str:
    """Return the name of a phase's seconds in the log.

    >>> time_metric(Phase.TRAIN)
    'time/train_s'
    """
    return f"time/{phase}_s"
