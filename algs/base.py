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

from algs.credit import Scale, group_advantages, spread, whiten
from algs.ops import importance_ratio, k3
from algs.terms import KL, Correction, Overlong
from core.section import Section
from core.types import Group, LossNorm, Policy, Rows, Sample, Scored, Tokens

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
    def rows(self) -> Rows:
        """What it learns from in supervised learning."""
        return "conversations"

    @property
    def trains(self) -> Literal["policy", "reward"]:
        """A language model, by `loss`; or a reward model, which gives one number per sequence, by `value_loss`."""
        return "policy"

    @property
    def whole_groups(self) -> bool:
        """True if the loss compares the samples of a group: no group is split, and `tokens.group_ids` is there."""
        return False

    @property
    def needs(self) -> frozenset[Scored]:
        """Columns the trainer must score before credit is assigned."""
        return frozenset()

    @property
    def needs_entropy(self) -> bool:
        """True if `policy.entropy` is read."""
        return False

    @property
    def frozen(self) -> dict[Scored, str]:
        """Columns that frozen models score, and the path of each; "" is the model that the run starts from."""
        return {"ref_logp": ""} if "ref_logp" in self.needs else {}

    @property
    def value_lr(self) -> float | None:
        """Learning rate of the value model; None where there is none."""
        return None

    def keep(self, group: Group) -> bool:
        """Is this group worth training on? Asked at collection; if not, another prompt is drawn in its place."""
        return True

    def arrange(self, groups: list[Group]) -> list[Group]:
        """What to score and learn from, made of the rows of a step; before any column is scored."""
        return groups

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

    def value_loss(self, values: Tensor, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Loss of the value model's prediction before each learnt token, [M] -> [M]; and metrics."""
        raise NotImplementedError

    def objective(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """What is minimised, [M]: the loss and whatever this kind of algorithm adds to it."""
        return self.loss(policy, tokens)


class PolicyGradient(Algorithm):
    """Algorithms that learn from sampled tokens with an advantage. A subclass gives `assign` and `loss`."""

    correction: Correction = Correction()
    kl: KL = KL()
    overlong: Overlong = Overlong()
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus. 0 means that the entropy is not computed."""

    @property
    def anchored_on_rollout(self) -> bool:
        """True if `loss` itself weighs by pi / pi_rollout: a correction would do it twice, and is refused."""
        return False

    @model_validator(mode="after")
    def corrects_once(self) -> PolicyGradient:
        if self.anchored_on_rollout and self.correction.level != "none":
            raise ValueError(
                "this loss is weighted by pi / pi_rollout already, and a correction would do it twice: set "
                "correction.level to none"
            )
        return self

    @property
    def not_on_policy(self) -> str:
        """Why the gradient of `loss` is not -weight x advantage when policy, proximal policy and engine are one; it
        is, if nothing is said here. Read by algs.check."""
        return ""

    @property
    def needs_siblings(self) -> bool:
        """True if a group of one would teach nothing."""
        return False

    @property
    def needs(self) -> frozenset[Scored]:
        if self.kl.in_reward:
            return frozenset({"ref_logp", "prox_logp"})
        return frozenset({"ref_logp"} if self.kl.in_loss else ())

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef > 0

    def credit(self, groups: list[Group]) -> list[Group]:
        """The algorithm's advantages; answers that are filtered keep theirs and are not learnt from."""
        assigned = self.assign(groups)
        if self.overlong.mode != "filter":
            return assigned
        return [[replace(s, left_out=[True] * len(s.mask)) if s.stop == "length" else s for s in g] for g in assigned]

    def assign(self, groups: list[Group]) -> list[Group]:
        """Every sample with its advantage, over all groups of the step."""
        raise NotImplementedError

    def kl_rewards(self, sample: Sample) -> list[float]:
        """-coef x k1 of each learnt token, where the KL is in the reward; 0 else."""
        at = [t for t, yes in enumerate(sample.learnt) if yes]
        if not at or not self.kl.in_reward:  # a failed sample is never scored
            return [0.0] * len(at)
        old, ref = sample.columns["prox_logp"], sample.columns["ref_logp"]
        return [-self.kl.coef * (old[t] - ref[t]) for t in at]

    def reward_of(self, sample: Sample) -> float | None:
        """The reward after the penalties for length and for leaving the reference; None for a failed sample."""
        if sample.reward is None:
            return None
        return sample.reward + self.overlong.penalty(sample) + sum(self.kl_rewards(sample))

    def objective(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """correction x policy term + KL - entropy, [M]; the last two are not corrected."""
        tokens = with_prox(policy, tokens)
        rollout, prox = tokens.rollout_logp, tokens.prox_logp
        assert rollout is not None and prox is not None
        loss, metrics = self.loss(policy, tokens)
        check_per_token(self, loss, metrics, tokens)  # before the correction, which would spread a mean over all tokens
        rho = importance_ratio(prox, rollout)
        metrics["mismatch/kl"] = rho - 1 - rho.log()
        metrics["mismatch/abs_logp"] = (prox - rollout).abs()
        metrics["mismatch/ratio"], metrics["mismatch/ratio_sq"] = rho, rho.square()  # their means give the ESS
        if self.correction.level != "none":
            weight = self.correction.weight(prox, rollout, tokens.seq_ids)
            metrics["mismatch/weight"] = weight
            loss = loss * weight
        if tokens.ref_logp is not None:
            metrics["kl_ref"] = k3(policy.logp.detach(), tokens.ref_logp)
        if self.kl.in_loss:
            loss = loss + self.kl.coef * self.kl.penalty(policy.logp, tokens)
        if policy.entropy is not None:
            metrics["entropy"] = policy.entropy
            loss = loss - self.entropy_coef * policy.entropy
        return loss, metrics


def check_per_token(alg: Algorithm, loss: Tensor, metrics: Metrics, tokens: Tokens) -> None:
    """Raise ValueError for a loss that reduced, or gave one value per sequence: it would be broadcast and be wrong."""
    for name, value in {"the loss": loss, **metrics}.items():
        if value.shape != tokens.weight.shape:
            raise ValueError(
                f"{type(alg).__name__}: {name} has shape {list(value.shape)}, expected one value per learnt token, "
                f"{list(tokens.weight.shape)}: return it unreduced, the framework weighs and adds up"
            )


def with_prox(policy: Policy, tokens: Tokens) -> Tokens:
    """With one update per synchronous rollout the proximal policy is the current one: its column is not scored."""
    return replace(tokens, prox_logp=policy.logp.detach()) if tokens.prox_logp is None else tokens


def over_learnt(sample: Sample, values: list[float]) -> list[float]:
    """One value per learnt token, laid out over the whole sample, [L]; 0 elsewhere."""
    rest = iter(values)
    return [next(rest) if yes else 0.0 for yes in sample.learnt]


def with_advantages(groups: list[Group], per_token: list[list[float]]) -> list[Group]:
    """The groups with the advantages of their samples' learnt tokens; one row per sample, in order."""
    rows = iter(per_token)
    return [[replace(s, advantage=over_learnt(s, next(rows))) for s in g] for g in groups]


class GroupRelative(PolicyGradient):
    """Credit is reward above the mean of one's siblings; no critic."""

    scale: Scale = "none"
    """Divide the centred reward by nothing, by the group's or by the step's standard deviation of rewards, or by the
    group's mean reward (MaxRL)."""
    leave_one_out: bool = False
    """The mean is that of the other siblings (RLOO); else of all."""
    whiten: bool = False
    """Bring the advantages of a step's tokens to mean 0 and variance 1 at the end."""
    drop_dead_groups: bool = False
    """Draw another prompt in place of one whose rewards are all equal (DAPO's dynamic sampling)."""

    @property
    def needs_siblings(self) -> bool:
        return True

    def keep(self, group: Group) -> bool:
        scored = {s.reward for s in group if s.reward is not None}
        return len(scored) > 1 or not self.drop_dead_groups

    def assign(self, groups: list[Group]) -> list[Group]:
        rewards = [[self.reward_of(s) for s in g] for g in groups]
        std = spread([r for g in rewards for r in g])
        advantages = [
            group_advantages(g, scale=self.scale, leave_one_out=self.leave_one_out, batch_std=std) for g in rewards
        ]
        samples = [s for g in groups for s in g]
        per_token = [[a] * sum(s.learnt) for s, a in zip(samples, (a for g in advantages for a in g), strict=True)]
        return with_advantages(groups, whiten(per_token) if self.whiten else per_token)
