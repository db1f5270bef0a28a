"""What a trainer asks of one model in training."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import NotRequired, Protocol, TypedDict

from torch import Tensor, nn

from weight_sync.base import Part


class Learner(Protocol):
    """Every method is called on all ranks at once."""

    model: nn.Module
    module: nn.Module
    """What is called in a forward pass: the model, or what wraps it."""

    def backward(self, loss: Tensor) -> None:
        """Add to the gradient of this update."""
        ...

    def gradients_are_finite(self) -> bool:
        """The same answer on every rank."""
        ...

    def update(self, *, lr: float, apply: bool) -> float:
        """Clip and step, or throw the gradients away; returns the norm before clipping, not finite if thrown away."""
        ...

    def weights(self, max_bytes: int, part: Part = "whole") -> Generator[list[tuple[str, Tensor]]]:
        """Every tensor once, whole, in buckets of at most `max_bytes` (one tensor at least)."""
        ...

    def save_state(self, folder: Path) -> None:
        """Write what `load_state` needs to go on to the bit: the float32 weights in training and the optimizer."""
        ...

    def load_state(self, folder: Path) -> None: ...


class Settings(TypedDict):
    """What a trainer is told beside its model, its algorithm and its own section of the recipe."""

    temperature: float
    total_updates: int
    sources: NotRequired[tuple[str, ...]]
    """Data sets whose loss is told apart."""
    reference_ahead: NotRequired[bool]
    """The reference was scored before training: no second model is loaded for it."""
