"""algs.check finds what is wrong in some cases only: with a failed sample, in later updates, beside a teacher."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from algs.base import Metrics
from algs.check.checker import check
from algs.credit import with_advantages
from algs.grpo import GRPO
from algs.teachers import START, Teacher
from core.types.samples import Group, Policy, ScoredColumn, Tokens


class DropsSteps(GRPO):
    """It learns nothing from a step in which a sample has failed."""

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        if any(s.reward is None for g in groups for s in g):
            return with_advantages(groups, [0.0 for g in groups for _ in g])
        return super().compute_advantages(groups)


def test_the_gradient_with_failed_samples_is_told_before_that_without():
    [e] = check(DropsSteps, letters="e")
    said = r"failed samples: the gradient by logp at [\w ,]+ is -?0 instead of -?0\.\d+ without them"
    assert e.status == "FAILED" and re.fullmatch(said, e.detail), e


class CentresLater(GRPO):
    """It takes the mean of the micro-batch away in every update of a step but the first."""

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        loss, metrics = super().loss(policy, tokens)
        is_first = torch.equal(tokens.prox_logp, policy.logp.detach())
        return loss if is_first else loss - loss.mean(), metrics


def test_a_mistake_of_later_updates_is_told_of_several_updates():
    [a] = check(CentresLater, letters="a")
    said = r"several updates per step, loss_norm \w+, micro-batches of at most 20 tokens on 1 ranks: the gradient .*"
    assert a.status == "FAILED" and re.fullmatch(said, a.detail), a


class Returns(GRPO):
    """The teacher becomes the policy again now and then, and one setting does nothing."""

    scaled: float = 1.0

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        return super().required_columns | {"ref_logp"}

    @property
    def teachers(self) -> dict[str, Teacher]:
        return {"ref_logp": Teacher(START, when=lambda state: False)}

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        loss, metrics = super().loss(policy, tokens)
        return loss, metrics | {"scaled": torch.full_like(loss, self.scaled)}


def test_a_teacher_that_returns_lends_no_effect_to_a_setting():
    [g] = check(Returns, letters="g")
    assert (g.status, g.detail) == ("ok", "scaled; note: no effect seen of scaled")


def test_an_entropy_bonus_does_not_change_what_is_found_off_policy():
    found = check("grpo", {"entropy_coef": 0.1}, letters="hkl")
    assert [r.status for r in found] == ["ok"] * 3 and found == check("grpo", letters="hkl")
