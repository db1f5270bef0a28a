"""An algorithm is a frozen set of hyper-parameters with a few pure methods.

It is parsed from the `alg:` section of a recipe and called by name from the main loop and the
trainers. It never touches a device, a process, a file or a configuration other than its own. The
framework masks, corrects, weighs and reduces; an algorithm says what one token is worth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor

from algs.ops import group_advantages, importance_ratio, k2, k3, spread
from core.section import Section
from core.types import Column, Group, LossNorm, Policy, Tokens

Metrics = dict[str, Tensor]
"""Per-token values, [M] each. The framework averages them with the token weights, over micro-batches and ranks."""


class Algorithm(Section):
    """What every algorithm is. Only `loss` is required."""

    name: str = ""
    file: str = ""
    """Path of a Python file with one Algorithm in it; instead of `name`, for an algorithm kept elsewhere."""
    loss_norm: LossNorm = "token"
    """What counts the same: every token of the update (token), every sequence (sequence: its tokens share;
    sequence_sum: they add up), every token of every update (constant), or every prompt (prompt)."""

    @property
    def needs(self) -> frozenset[Column]:
        """Columns the trainer must score before credit is assigned."""
        return frozenset()

    @property
    def needs_entropy(self) -> bool:
        """True if `policy.entropy` is read."""
        return False

    def keep(self, group: Group) -> bool:
        """Is this group worth training on? Asked at collection; if not, another prompt is drawn in its place."""
        return True

    def credit(self, groups: list[Group]) -> list[Group]:
        """Give every sample its advantage, [L]; once per step, over all its groups, when the columns exist."""
        return groups

    def totals(self, policy: Policy, tokens: Tokens) -> dict[str, Tensor]:
        """Sums over one micro-batch of what the loss must know of the whole update; they arrive in `tokens.totals`.

        Costs one extra forward pass per update, and keeps a number that is not linear in tokens
        independent of how the update was cut.
        """
        return {}

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Loss of each learnt token, [M], not reduced; and metrics, [M] each."""
        raise NotImplementedError

    def objective(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """What is minimised, [M]: the loss and whatever this kind of algorithm adds to it."""
        return self.loss(policy, tokens)


class Correction(Section):
    """Importance weights between the rollout engine and the trainer: rho = pi_prox / pi_rollout, detached."""

    level: Literal["none", "token"] = "token"
    mode: Literal["truncate", "clip", "mask"] = "truncate"
    """truncate: min(rho, high). clip: rho between low and high. mask: rho where low <= rho <= high, else 0."""
    low: float = Field(default=0.5, ge=0)
    """Read by clip and mask."""
    high: float = Field(default=2.0, gt=0)

    @model_validator(mode="after")
    def bounds_are_in_order(self) -> Correction:
        if self.mode != "truncate" and self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}, so no token would be left: swap them")
        return self

    def weight(self, prox_logp: Tensor, rollout_logp: Tensor) -> Tensor:
        """[M], detached: what the policy term of each token is multiplied by."""
        rho = importance_ratio(prox_logp, rollout_logp)
        match self.mode:
            case "truncate":
                return rho.clamp(max=self.high)
            case "clip":
                return rho.clamp(self.low, self.high)
            case "mask":
                return rho * ((rho >= self.low) & (rho <= self.high))


class KL(Section):
    """Penalty for leaving the reference model, added to the loss; the choice of estimator is a choice of gradient."""

    coef: float = Field(default=0.0, ge=0)
    """0 means that no reference model is loaded at all."""
    estimator: Literal["k2", "k3", "unbiased"] = "unbiased"
    """Gradient of each under on-policy samples: k2 that of KL(pi||ref); k3 that of KL(ref||pi), as GRPO published it;
    unbiased (live ratio x k3, DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, Eq. 7) that of KL(pi||ref), off-policy
    too. k1 is not offered: as a loss its expected gradient is zero."""

    def penalty(self, logp: Tensor, tokens: Tokens) -> Tensor:
        """[M], with gradient."""
        assert tokens.ref_logp is not None and tokens.rollout_logp is not None
        match self.estimator:
            case "k2":
                return k2(logp, tokens.ref_logp)
            case "k3":
                return k3(logp, tokens.ref_logp)
            case "unbiased":
                return importance_ratio(logp, tokens.rollout_logp) * k3(logp, tokens.ref_logp)


class PolicyGradient(Algorithm):
    """Algorithms that learn from sampled tokens with an advantage."""

    correction: Correction = Correction()
    kl: KL = KL()
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus. 0 means that the entropy is not computed."""

    @property
    def needs(self) -> frozenset[Column]:
        return frozenset({"ref_logp"} if self.kl.coef > 0 else ())

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef > 0

    def objective(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """correction x policy term + KL - entropy, [M]; the last two are not corrected.

        With one update per synchronous rollout the proximal policy is the current one, so its column
        is not scored: it is `logp`, detached.
        """
        rollout = tokens.rollout_logp
        assert rollout is not None
        prox = policy.logp.detach() if tokens.prox_logp is None else tokens.prox_logp
        loss, metrics = self.loss(policy, replace(tokens, prox_logp=prox))
        rho = importance_ratio(prox, rollout)
        metrics["mismatch/kl"] = rho - 1 - rho.log()
        metrics["mismatch/abs_logp"] = (prox - rollout).abs()
        if self.correction.level == "token":
            weight = self.correction.weight(prox, rollout)
            metrics["mismatch/weight"] = weight
            loss = loss * weight
        if self.kl.coef > 0:
            penalty = self.kl.penalty(policy.logp, tokens)
            metrics["kl_ref"] = penalty
            loss = loss + self.kl.coef * penalty
        if policy.entropy is not None:
            metrics["entropy"] = policy.entropy
            loss = loss - self.entropy_coef * policy.entropy
        return loss, metrics


class GroupRelative(PolicyGradient):
    """Credit is reward above the mean of one's siblings; no critic."""

    std: Literal["none", "group", "batch"] = "none"
    """Divide the centred reward by nothing, by the group's standard deviation, or by that of the step's rewards."""
    drop_dead_groups: bool = False
    """Draw another prompt in place of one whose rewards are all equal (DAPO's dynamic sampling)."""

    def keep(self, group: Group) -> bool:
        scored = {s.reward for s in group if s.reward is not None}
        return len(scored) > 1 or not self.drop_dead_groups

    def credit(self, groups: list[Group]) -> list[Group]:
        batch = spread([s.reward for g in groups for s in g])

        def credited(group: Group) -> Group:
            rewards = [s.reward for s in group]
            scale = {"none": None, "group": spread(rewards), "batch": batch}[self.std]
            advantages = group_advantages(rewards, scale=scale)
            return [replace(s, advantage=[a] * len(s.mask)) for s, a in zip(group, advantages, strict=True)]

        return [credited(g) for g in groups]
