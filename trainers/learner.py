"""Interface of a learner, which is a model in training with an optimizer."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import NotRequired, Protocol, TypedDict

from torch import Tensor, nn

from core.types.allowed_tokens import AllowedTokens
from core.types.routes import RouterReplay
from core.types.weights import Bucket, ExportScope
from trainers.observers import ObserverFactory


class Learner(Protocol):
    """Train a model with an optimizer. Every method is called on all ranks at once."""

    model: nn.Module
    module: nn.Module
    """The callable of a forward pass: the model, or its wrapper."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` to that of this update."""
        ...

    def has_finite_gradients(self) -> bool:
        """Return True if the gradients of all ranks are finite; the result is the same on every rank."""
        ...

    def update(self, *, lr: float, apply: bool) -> float:
        """Clip and step, or discard the gradients; return the norm before clipping, not finite if discarded."""
        ...

    def export_weights(self, max_bytes: int, scope: ExportScope = "whole") -> Generator[Bucket]:
        """Yield every tensor once, unsharded, in buckets of at most `max_bytes` (at least a single tensor)."""
        ...

    def save_state(self, folder: Path) -> None:
        """Write the float32 master weights and the optimizer; `load_state` continues from them to the bit."""
        ...

    def load_state(self, folder: Path) -> None:
        """Restore what `save_state` wrote."""
        ...

    def list_masters(self) -> list[Tensor]:
        """Return the float32 weights that this rank updates: of the whole model, or its shards, in a fixed order."""
        ...

    def show_masters(self) -> None:
        """Give the model the values of `list_masters`, after they were changed."""
        ...

    def clear_moments(self) -> None:
        """Make the optimizer as new."""
        ...

    def save_copies(self, copies: list[Tensor], folder: Path) -> None:
        """Write copies of `list_masters`, to the bit."""
        ...

    def load_copies(self, copies: list[Tensor], folder: Path) -> None:
        """Read what `save_copies` wrote into tensors in place."""
        ...


class TrainerSettings(TypedDict):
    """Trainer settings besides the model, the algorithm and the trainer section of the recipe."""

    temperature: float
    total_updates: int
    observers: NotRequired[Mapping[str, ObserverFactory]]
    """Observer factories, by the recipe key that enables them."""
    allowed_tokens: NotRequired[AllowedTokens]
    """Tokens that the engine samples from, over which the softmax is taken. Unset: all."""
    has_ref_logp: NotRequired[bool]
    """True: reference log-probabilities were computed before training, so no reference model is loaded."""
    router_replay: NotRequired[RouterReplay]
    """Use of the routes that the engine recorded. Unset: off."""
