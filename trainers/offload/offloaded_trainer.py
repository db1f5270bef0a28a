"""Offload a colocated trainer rank to the CPU while the engine generates.

Offloading has two parts, because new weights must be sent while the engine's weights are already on the device:

    offload_states     optimizer, master weights, gradients, value model, teachers; the policy's weights stay
    offload_weights    the policy's weights, once they have been sent
    reload_states      everything is restored, to the bit

It works on storages, so it serves every kind of learner (trainers/offload/storages.py). A stand-in replaces each
offloaded learner and raises on use, because reading a tensor without memory would crash the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from core.errors import RunStopped
from core.timing.clock import ActivityTimer
from core.timing.phases import Activity
from trainers.learner import Learner
from trainers.offload.storages import OffloadedStorages, find_storages, identify
from trainers.references import Reference

SENDING = frozenset({"model", "module", "export_weights"})
"""Policy attributes that may be used while the optimizer is offloaded: enough to send and verify the weights."""


class Offloadable(Protocol):
    """Offloadable trainer: the attributes that hold its parts."""

    rank: int
    device: str
    timer: ActivityTimer
    policy: Learner
    critic: Learner | None
    frozen: dict[str, nn.Module]
    references: dict[str, Reference]


class OffloadedTrainer:
    """Offloading of a trainer rank. Every method is called on all ranks at once."""

    def __init__(self, trainer: Offloadable):
        self.trainer = trainer
        self.aside = OffloadedStorages()
        self.left: list[str] = []
        """Offloaded parts, in order."""

    def name_devices(self) -> str:
        """Return the GPUs that Ray gave this rank, as CUDA_VISIBLE_DEVICES has them; "" on a CPU."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def offload_states(self) -> int:
        """Offload everything but the weights of the policy. Return the freed bytes."""
        self._check_left([], "offload_states")
        trainer, device = self.trainer, self.trainer.device
        with trainer.timer.measure(Activity.OFFLOAD):
            self.there = trainer.policy, trainer.critic, trainer.frozen
            release_gathered(trainer.policy, trainer.critic)
            stay = {identify(s) for s in find_storages(*list_weights(trainer.policy), device=device)}
            freed = self.aside.put(
                s for s in find_storages(self.there, trainer.references, device=device) if identify(s) not in stay
            )
            self.left = ["states"]
            self._stand_in(SENDING)
            return freed

    def offload_weights(self) -> int:
        """Offload the weights of the policy, after `offload_states`. Return the freed bytes."""
        self._check_left(["states"], "offload_weights")
        with self.trainer.timer.measure(Activity.OFFLOAD):
            policy, _, _ = self.there
            release_gathered(policy)
            freed = self.aside.put(find_storages(policy, device=self.trainer.device))
            self.left = ["states", "weights"]
            self._stand_in(frozenset({"model"}))
            return freed

    def reload_states(self) -> None:
        """Reload everything."""
        self._check_left(["states", "weights"], "reload_states")
        with self.trainer.timer.measure(Activity.RELOAD):
            self.aside.bring_back()
            self.trainer.policy, self.trainer.critic, self.trainer.frozen = self.there
            self.left = []

    def _check_left(self, expected: list[str], call: str) -> None:
        if self.left != expected:
            away = " and ".join(self.left) or "nothing"
            raise RunStopped(f"trainer {self.trainer.rank}: {call}() was called while {away} of it was away")

    def _stand_in(self, allowed: frozenset[str]) -> None:
        trainer, (policy, critic, frozen) = self.trainer, self.there

        def make_absent(real: object, allowed: frozenset[str]) -> Any:
            return Absent(real, trainer.rank, allowed)

        trainer.policy = make_absent(policy, allowed)
        trainer.critic = None if critic is None else make_absent(critic, frozenset({"model"}))
        trainer.frozen = {column: make_absent(model, frozenset()) for column, model in frozen.items()}


class Absent:
    """Stand-in for an offloaded learner or model. Using other than the allowed attributes raises RunStopped."""

    def __init__(self, real: object, rank: int, allowed: frozenset[str]):
        self._real, self._rank, self._allowed = real, rank, allowed

    def __getattr__(self, name: str) -> Any:
        if name in self._allowed:
            return getattr(self._real, name)
        raise RunStopped(
            f"trainer {self._rank} was to use {name} of a model while it was away from its device: the driver lets it "
            "return first (driver/rl/colocation.py)"
        )


def release_gathered(*learners: Learner | None) -> None:
    """Free the full weights that FSDP2 units have gathered; the shards remain."""
    for learner in filter(None, learners):
        for unit in learner.model.modules():
            if callable(reshard := getattr(unit, "reshard", None)):  # by its name: to import FSDP2 takes a while
                reshard()


def list_weights(policy: Learner) -> Iterator[Tensor]:
    """Yield the weight tensors of the policy, or this rank's shards."""
    for parameter in policy.model.parameters():
        yield parameter.data
        yield getattr(parameter, "ds_tensor", parameter.data)  # with ZeRO-3
    yield from policy.model.buffers()
