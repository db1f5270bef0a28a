"""Sleep of an engine that shares its device with a trainer: which calls are in order, the same for every engine.

awake --sleep--> asleep --wake weights--> weights awake --wake cache--> awake
                              new weights come here, with the memory of the cache still free
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

from core.errors import RunStopped

WakePart = Literal["weights", "kv_cache"]
"""Memory of an engine that wakes, in vLLM's words: first its weights, then its KV cache."""


class SleepState(Enum):
    """State of an engine; its value is how a sentence names it."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    WEIGHTS_AWAKE = "awake only with its weights"


class Sleeper:
    """State of one engine, with a check before each call that needs another one. Without memory nothing may run."""

    def __init__(self) -> None:
        self.state = SleepState.AWAKE

    @property
    def may_sample(self) -> bool:
        return self.state is SleepState.AWAKE

    def check_sampling(self) -> None:
        """Raise RunStopped for a request to an engine that has no weights, or no cache."""
        if not self.may_sample:
            raise RunStopped(f"an engine was to sample while it was {self.state.value}: wake its weights and its cache")

    def check_loading(self) -> None:
        """Raise RunStopped for weights that come to an engine without memory for them."""
        if self.state is SleepState.ASLEEP:
            raise RunStopped("an engine was sent weights while it was asleep: wake its weights first")

    def fall_asleep(self, *, running: int) -> None:
        """Go to sleep; running: requests that are not finished. Raises RunStopped where that is out of order."""
        if self.state is not SleepState.AWAKE:
            raise RunStopped(f"an engine was to sleep while it was {self.state.value}")
        if running:
            raise RunStopped(f"an engine was to sleep while it had {running} requests: wait until they are finished")
        self.state = SleepState.ASLEEP

    def wake(self, part: WakePart) -> None:
        """Wake a part. Raises RunStopped where that is out of order."""
        before, after = {
            "weights": (SleepState.ASLEEP, SleepState.WEIGHTS_AWAKE),
            "kv_cache": (SleepState.WEIGHTS_AWAKE, SleepState.AWAKE),
        }[part]
        if self.state is not before:
            raise RunStopped(f"an engine was to wake its {part} while it was {self.state.value}")
        self.state = after
