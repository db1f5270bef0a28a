"""Averages and earlier copies of the policy's weights: teachers that move, and the average that is saved.

A reference is a float32 copy of the policy's trained weights, in the shards that a rank updates. To score, it changes
places with them: no second model is loaded, and sharding, layout and adapter are the policy's.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from trainers.learner import Learner

AVERAGE = "trainer.ema"
"""Name of the average of the weights that is saved, beside those of teachers."""


class Reference:
    """Copy of the policy's weights that follows them. Every method is called on all ranks at once."""

    def __init__(self, policy: Learner):
        self.weights: list[Tensor] = [w.detach().clone() for w in policy.list_masters()]

    @torch.no_grad()
    def move(self, policy: Learner, rate: float) -> None:
        """Move by `rate` of the way to the policy; 1: become the policy, to the bit.

        Elementwise, so any number of ranks computes the same.
        """
        for own, now in zip(self.weights, policy.list_masters(), strict=True):
            if rate == 1:
                own.copy_(now)
            else:
                own.lerp_(now, rate)  # own + rate (now - own): equal weights stay equal

    @contextmanager
    def in_place_of(self, policy: Learner) -> Generator[None]:
        """Give the policy's model these weights inside the block."""
        self._change_places(policy)
        try:
            yield
        finally:
            self._change_places(policy)

    @torch.no_grad()
    def _change_places(self, policy: Learner) -> None:
        for own, now in zip(self.weights, policy.list_masters(), strict=True):
            kept = own.clone()  # one tensor at a time, not another copy of the model
            own.copy_(now)
            now.copy_(kept)
        policy.show_masters()

    def save_state(self, policy: Learner, folder: Path) -> None:
        policy.save_copies(self.weights, folder)

    def load_state(self, policy: Learner, folder: Path) -> None:
        policy.load_copies(self.weights, folder)


ZERO_WHEN_NEW = frozenset({"step", "exp_avg", "exp_avg_sq", "momentum"})
"""States of AdamW and Muon, which begin with zeros."""


def clear_moments(optimizer: torch.optim.Optimizer) -> None:
    """Set an optimizer's state to that of a new one."""
    # a setting of the class, which all groups share; ZeRO-3 keeps no parameters in them between two updates
    first_sum = optimizer.param_groups[0].get("initial_accumulator_value")
    for parameter, state in [*optimizer.state.items()]:
        if first_sum is not None and {*state} == {"step", "sum"}:  # Adagrad makes its states before the first update
            state["step"].zero_()
            state["sum"].fill_(first_sum)
        elif {*state} <= ZERO_WHEN_NEW:
            for value in state.values():
                value.zero_()
        else:
            # not all are zero in a new one: NAdam has a product, and eight-bit moments a table of values
            del optimizer.state[parameter]
