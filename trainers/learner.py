"""Interface of one model in training."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import NotRequired, Protocol, TypedDict

from torch import Tensor, nn

from core.types.allowed_tokens import AllowedTokens
from core.types.weights import Bucket, ExportScope
from trainers.observers import ObserverFactory


class Learner(Protocol):
    """Train one model with its optimizer. Every method is called on all ranks at once."""

    model: nn.Module
    module: nn.Module
    """The callable of a forward pass: the model, or its wrapper."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` to that of this update."""
        ...

    def has_finite_gradients(self) -> bool:
        """Tell whether every rank's gradient is finite; the same answer on every rank."""
        ...

    def update(self, *, lr: float, apply: bool) -> float:
        """Clip and step, or discard the gradients; return the norm before clipping, not finite if discarded."""
        ...

    def export_weights(self, max_bytes: int, scope: ExportScope = "whole") -> Generator[Bucket]:
        """Yield every tensor once, whole, in buckets of at most `max_bytes` (one tensor at least)."""
        ...

    def save_state(self, folder: Path) -> None:
        """Write the float32 weights in training and the optimizer, from which `load_state` continues to the bit."""
        ...

    def load_state(self, folder: Path) -> None:
        """Restore what `save_state` wrote."""
        ...


class TrainerSettings(TypedDict):
    """Settings of a trainer besides its model, its algorithm and its own section of the recipe."""

    temperature: float
    total_updates: int
    observers: NotRequired[Mapping[str, ObserverFactory]]
    """What is measured beside the training, by the key of the recipe that asks for it."""
    allowed_tokens: NotRequired[AllowedTokens]
    """Tokens that the engine samples from, over which the softmax is taken. Unset: all."""
    has_ref_logp: NotRequired[bool]
    """True: reference log-probabilities were computed before training, so no reference model is loaded."""
