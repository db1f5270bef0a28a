"""Obligations look at fresh and at stale updates, and at other loss norms: a mistake may be in one of them alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from algs.base import Metrics
from algs.check.checker import check
from algs.check.update import describe_updates
from algs.grpo import GRPO
from core.types.samples import Group, Policy, Sample, Tokens
from core.types.terms import TokenLoss

pytestmark = pytest.mark.one_core

LOSSES: dict[str, Callable[[Tensor, Policy], Tensor]] = {
    "a": lambda loss, policy: loss * len(loss),
    "c": lambda loss, policy: loss * policy.logp.sum().item(),
    "d": lambda loss, policy: 2 * loss,
    "e": lambda loss, policy: loss + math.inf,
}
PENALTIES: dict[str, Callable[[Sample], float]] = {
    "b": lambda s: float(s.rollout_logp[0]),
    "j": lambda s: 0.01 * len(s.token_ids),
}


class WrongSometimes(GRPO):
    """Breaks an obligation in stale updates, or in fresh ones; perhaps under other loss norms than its own only."""

    breaks: str = ""
    stale: bool = False
    of_others: bool = False

    def is_wrong(self, is_stale: bool) -> bool:
        return is_stale == self.stale and not (self.of_others and self.loss_norm == "token")

    def objective(self, policy: Policy, tokens: Tokens, of_term: TokenLoss | None = None) -> tuple[Tensor, Metrics]:
        loss, metrics = super().objective(policy, tokens, of_term)
        change = LOSSES.get(self.breaks) if self.is_wrong(tokens.has("prox_logp")) else None
        return (loss if change is None else change(loss, policy)), metrics

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        def lower(s: Sample) -> Sample:
            penalty = PENALTIES.get(self.breaks) if self.is_wrong("prox_logp" in s.columns) else None
            return s if penalty is None or s.reward is None else replace(s, reward=s.reward - penalty(s))

        return super().compute_advantages([[lower(s) for s in group] for group in groups])


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("letter", "abcdej")
def test_a_mistake_in_one_kind_of_update_is_caught(letter: str, stale: bool):
    settings: dict[str, Any] = {"breaks": letter, "stale": stale}
    [found] = check(WrongSometimes, settings, letters=letter)
    assert found.status == "FAILED", found
    if letter in "acj":
        assert found.detail.startswith(describe_updates(stale)), found


def test_a_cut_that_changes_the_loss_under_another_norm_is_caught():
    [found] = check(WrongSometimes, {"breaks": "j", "stale": True, "of_others": True}, letters="j")
    assert found.status == "FAILED" and found.detail.startswith("several updates per step, loss_norm sequence, "), found
