"""Sleep states of a colocated engine, and the calls allowed in each state.

awake --sleep--> asleep --wake weights--> weights awake --wake cache--> awake
                              new weights are loaded here, while the cache memory is still free
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

from core.errors import RunStopped

WakePart = Literal["weights", "kv_cache"]
"""Part of an engine's memory, in vLLM's words: weights first, then KV cache."""


class SleepState(Enum):
    """Sleep state of an engine. The value is the wording in errors."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    WEIGHTS_AWAKE = "awake only with its weights"


class Sleeper:
    """State machine of one engine's sleep. It checks that weights and cache are in memory before each call."""

    def __init__(self) -> None:
        self.state = SleepState.AWAKE

    @property
    def may_sample(self) -> bool:
        return self.state is SleepState.AWAKE

    def check_sampling(self) -> None:
        """Raise RunStopped for a request to an engine without weights or cache in memory."""
        if not self.may_sample:
            raise RunStopped(f"an engine was to sample while it was {self.state.value}: wake its weights and its cache")

    def check_loading(self) -> None:
        """Raise RunStopped for a weight update of an engine without memory for weights."""
        if self.state is SleepState.ASLEEP:
            raise RunStopped("an engine was sent weights while it was asleep: wake its weights first")

    def fall_asleep(self, *, running: int) -> None:
        """Enter the sleep state. running: unfinished requests. Raises RunStopped if the engine is not idle and
        awake."""
        if self.state is not SleepState.AWAKE:
            raise RunStopped(f"an engine was to sleep while it was {self.state.value}")
        # an unfinished request would lose its cache
        if running:
            raise RunStopped(f"an engine was to sleep while it had {running} requests: wait until they are finished")
        self.state = SleepState.ASLEEP

    def wake(self, part: WakePart) -> None:
        """Wake a part. Raises RunStopped if the order is wrong."""
        before, after = {
            "weights": (SleepState.ASLEEP, SleepState.WEIGHTS_AWAKE),
            "kv_cache": (SleepState.WEIGHTS_AWAKE, SleepState.AWAKE),
        }[part]
        if self.state is not before:
            raise RunStopped(f"an engine was to wake its {part} while it was {self.state.value}")
        self.state = after
