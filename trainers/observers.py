"""Observers of a training step, such as metrics, recorders and compared losses.

`Trainer.step` calls them at five moments. They read and change nothing, so a step is the same to the bit with all of
them and with none. They are no interface for users: driver/start/observers.py lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from algs.base import Metrics
from core.types.samples import Batch, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSeen:
    """A micro-batch after its forward and backward pass. Every tensor is detached."""

    batch: Batch
    policy: Policy | None
    """None for a reward model."""
    loss: Tensor
    """[M] loss of each token."""
    metrics: Metrics

    @staticmethod
    def detached(batch: Batch, policy: Policy | None, loss: Tensor, metrics: Metrics) -> BatchSeen:
        """Return the record of a micro-batch whose graph may be freed."""
        if policy is not None:
            policy = policy.apply(Tensor.detach)
        metrics = {name: value.detach() for name, value in metrics.items()}
        return BatchSeen(batch=batch, policy=policy, loss=loss.detach(), metrics=metrics)


class Observer:
    """Base of the observers of a trainer rank. Every rank calls the same observers in the same order."""

    def begin_step(self) -> None:
        """Begin a step."""

    def begin_update(self) -> None:
        """Begin an update, before the weights change."""

    def on_batch(self, seen: BatchSeen) -> None:
        """Observe a micro-batch, after the backward pass."""

    def on_update(self, norms: Mapping[str, float]) -> None:
        """Observe a complete update. norms: gradient norms; empty if the update was skipped."""

    def finish(self) -> dict[str, float]:
        """End the step; return the metrics, the same on every rank."""
        return {}


ObserverFactory = Callable[[Any], Observer]
"""Factory of an observer, called with the trainer. It is pickled, so it is a class or a partial of a class."""


class Observers(Observer):
    """All observers of a trainer rank, by the recipe key that enables them."""

    def __init__(self, by_key: Mapping[str, Observer]):
        self.by_key = by_key

    def __getattr__(self, key: str) -> Observer:
        """Return the observer of a key. The driver uses it in `trainers.attribute("observers.capture")`."""
        if (observer := self.by_key.get(key)) is None:
            raise AttributeError(f"there is no observer {key}")
        return observer

    def begin_step(self) -> None:
        for observer in self.by_key.values():
            observer.begin_step()

    def begin_update(self) -> None:
        for observer in self.by_key.values():
            observer.begin_update()

    def on_batch(self, seen: BatchSeen) -> None:
        for observer in self.by_key.values():
            observer.on_batch(seen)

    def on_update(self, norms: Mapping[str, float]) -> None:
        for observer in self.by_key.values():
            observer.on_update(norms)

    def finish(self) -> dict[str, float]:
        return {name: value for o in self.by_key.values() for name, value in o.finish().items()}
