"""Names of everything timed: phases of the driver, activities of a device, milestones of a run."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Phase of the driver. The driver is in one phase at a time, so a step is the sum of phases and REST."""

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
    """Activity of a trainer rank or an engine."""

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


# Earlier entries win where activities overlap; see ActivityTimer.
TRAINER_ACTIVITIES = (Activity.TRAIN, Activity.LOGP, Activity.SYNC, Activity.SAVE)
ENGINE_ACTIVITIES = (Activity.SYNC, Activity.GENERATE, Activity.ENVIRONMENT, Activity.REWARD)
TURN_PHASES = (Phase.SLEEP, Phase.RELOAD, Phase.OFFLOAD, Phase.WAKE)
"""Phases that pass a shared device between trainers and engines, with placement: colocate."""
TRAINER_TURNS = (Activity.OFFLOAD, Activity.RELOAD)
ENGINE_TURNS = (Activity.SLEEP, Activity.WAKE)
"""Activities of the devices in these phases."""
IDLE = "idle"
"""Time of a device without any activity."""
REST = "rest"
"""Time outside all phases or activities."""
STEP = "step"
"""Time of a whole step."""


def time_metric(phase: str) -> str:
    """Return the metric name of a phase's seconds.

    >>> time_metric(Phase.TRAIN)
    'time/train_s'
    """
    return f"time/{phase}_s"
