"""Keys of `profile`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from core.strict_model import StrictModel

FOLDER = "profile"
"""Folder of the files in the run folder."""


class ProfileConfig(StrictModel):
    """Keys of `profile`."""

    steps: list[Annotated[int, Field(ge=0)]] = Field([])
    """Steps to profile. Trainers: the updates. Engines: the generation until the updates of the next step. The files
    are in the run folder's profile/, for https://ui.perfetto.dev. A profiled step is slower, and its numbers are the
    same."""
    trace: bool = True
    """Write a trace of operations and kernels (torch.profiler)."""
    memory: bool = False
    """Record allocations: in the trace, and of a GPU as a snapshot for https://docs.pytorch.org/memory_viz."""

    @model_validator(mode="after")
    def profiles_something(self) -> ProfileConfig:
        if self.steps and not (self.trace or self.memory):
            raise ValueError("steps are named, and neither trace nor memory is on: set one, or leave steps out")
        return self
