"""Base classes of algorithms: a frozen set of hyper-parameters with a few pure methods.

An algorithm is parsed from the recipe's `alg:` section and called by the main loop and the trainers. It never touches a
device, a process, a file or another configuration. The framework masks, corrects, weights and reduces; an algorithm
defines the contribution of a token.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from algs.credit import ScaleRewards, group_advantages, reward_std, sum_terms, whiten_tokens, with_advantages
from algs.ops import importance_ratio, k3, reaches_cap, reaches_clamp
from algs.reductions import Stage, Stages
from algs.state import Stateful
from algs.teachers import START, Teacher
from algs.terms import KL, AdaptiveEntropy, Correction, Overlong
from algs.turns import returns_std, reward_to_go, rewards_of_turns, spread_turns, turn_advantages
from algs.validate import Metrics, check_per_token, check_samples
from core.types.arrays import Floats
from core.types.episodes import prepare_credit
from core.types.measures import Measure
from core.types.samples import Group, LossNorm, Origin, Policy, Rows, Sample, ScoredColumn, Tokens
from core.types.terms import Term, TokenLoss


class Algorithm(Stateful):
    """Base of every algorithm. Only `loss` is required."""

    model_config = ConfigDict(allow_inf_nan=True)  # .inf is a bound that never binds
    name: str = ""
    file: str = ""
    """Path of a Python file with an Algorithm, instead of `name`."""
    loss_norm: LossNorm = "token"
    """Unit of equal weight: every token of the update (token), every sequence (sequence: mean over tokens;
    sequence_sum: sum), every token of every update (constant), or every prompt (prompt)."""

    @property
    def rows(self) -> Rows:
        """Kind of rows in supervised learning."""
        return "conversations"

    @property
    def model_kind(self) -> Literal["policy", "reward"]:
        """policy: a language model, trained by `loss`. reward: one value per sequence, trained by `value_loss`."""
        return "policy"

    @property
    def whole_groups(self) -> bool:
        """True if the loss compares samples of a group: groups are never split, and `tokens.group_ids` is set."""
        return False

    @property
    def whole_episodes(self) -> bool:
        """True if the loss reads `tokens.seq_ids`: an episode's samples stay in the same micro-batch."""
        return False

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        """Columns that the trainer computes before the advantages, available to the loss."""
        return frozenset()

    @property
    def needs_entropy(self) -> bool:
        """True if the loss reads `policy.entropy`."""
        return False

    @property
    def measures(self) -> dict[str, Measure]:
        """Functionals of each token's distribution: the loss reads `policy.<name>`, or a column `prox.<name>`."""
        return {}

    @property
    def teachers(self) -> dict[str, Teacher]:
        """Teachers: models whose log-probabilities are columns, by the column's name unless a teacher names another."""
        return {"ref_logp": Teacher(START)} if "ref_logp" in self.required_columns else {}

    @property
    def value_lr(self) -> float | None:
        """Learning rate of the value model; None without a value model."""
        return None

    def accept_group(self, group: Group) -> bool:
        """Tell whether to train on a complete group. If False, another prompt replaces it."""
        return True

    def prepare_groups(self, groups: list[Group]) -> list[Group]:
        """Convert the rows of a step to training samples, before any column is computed."""
        return groups

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        """Set `advantage` [L] on every sample, one per episode. Called once per step, on all groups."""
        return groups

    def totals(self, policy: Policy, tokens: Tokens) -> Stage | Stages:
        """Return the totals of an update for `tokens.totals`: sums, or reductions (algs/reductions.py).

        As a generator it yields one dict after another, and is sent the results so far. It costs a forward pass.
        """
        return {}

    def prepare_update(self, groups: list[Group]) -> list[Group]:
        """Change advantages, columns or `excluded` of an update's samples, for what depends on all of its tokens.

        Called on all groups of the update, after `compute_advantages`; an episode may be several samples here.
        """
        return groups

    @property
    def terms(self) -> tuple[Term, ...]:
        """Several losses, each on tokens of its own. Empty: one term, `loss` on the sampled tokens."""
        return ()

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Return the loss per token, [M], not reduced; and metrics, [M] each."""
        raise NotImplementedError

    def value_loss(self, values: Tensor, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Return the loss of the value model's prediction before each token, [M] -> [M]; and metrics, [M] each."""
        raise NotImplementedError

    def objective(self, policy: Policy, tokens: Tokens, of_term: TokenLoss | None = None) -> tuple[Tensor, Metrics]:
        """Return the minimised objective, [M]: the loss (that of a term, or `loss`), plus terms of this kind."""
        return (of_term or self.loss)(policy, tokens)


class PolicyGradient(Algorithm):
    """Base of algorithms that train on sampled tokens. A subclass defines `compute_advantages` and `loss`."""

    correction: Correction = Correction()
    kl: KL = KL()
    overlong: Overlong = Overlong()
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus; 0: the entropy is not computed."""
    adaptive_entropy: AdaptiveEntropy = AdaptiveEntropy()

    @property
    def anchored_on_rollout(self) -> bool:
        """True if `loss` is weighted by pi / pi_rollout itself; then a correction would apply twice, and is refused."""
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
        """Reason why the gradient of `loss` is not -weight x advantage even on policy, for algs.check; "" if it is."""
        return ""

    @property
    def not_outwards(self) -> str:
        """Reason why far from ratio 1 the gradient may turn against the advantage, for algs.check; "" if it may not."""
        return ""

    @property
    def needs_siblings(self) -> bool:
        """True if a group of one sample has no training signal."""
        return False

    @property
    def whole_episodes(self) -> bool:
        return self.correction.by_sequence

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        return self.kl.required_columns

    @property
    def teachers(self) -> dict[str, Teacher]:
        return dict.fromkeys(super().teachers, self.kl.reference)

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef > 0 or self.adaptive_entropy.target is not None

    @property
    def measures(self) -> dict[str, Measure]:
        return self.kl.measures

    def kl_rewards(self, sample: Sample) -> Floats:
        """Return -coef x k1 of each trained token, [n]; 0 unless the KL is in the reward."""
        n = sample.n_trained
        if not n or not self.kl.in_reward:  # a failed sample is never scored
            return np.zeros(n)
        old, ref = (sample.columns[name][sample.loss_mask].astype(np.float64) for name in ("prox_logp", "ref_logp"))
        return -self.kl.current_coef(self) * (old - ref)

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        raise NotImplementedError

    def penalised_reward(self, sample: Sample) -> float | None:
        """Return the reward plus penalties for length and KL; None for a failed sample."""
        if sample.reward is None:
            return None
        reward = sample.reward + self.overlong.compute_penalty(sample)
        return reward + sum_terms(self.kl_rewards(sample)) if self.kl.in_reward else reward

    def objective(self, policy: Policy, tokens: Tokens, of_term: TokenLoss | None = None) -> tuple[Tensor, Metrics]:
        """Return correction x policy loss + KL - entropy, [M]; KL and entropy are not corrected."""
        tokens = with_prox(policy, tokens)
        rollout, prox = tokens.rollout_logp, tokens.prox_logp
        # checked before the correction, which would spread a mean over all tokens
        loss, metrics = check_per_token(self, (of_term or self.loss)(policy, tokens), tokens)
        rho = importance_ratio(prox, rollout)
        # k3 of KL(rollout || prox): unbiased on the engine's samples, and never negative
        metrics["mismatch/kl"] = rho - 1 - rho.log()
        metrics["mismatch/abs_logp"] = (prox - rollout).abs()
        metrics["mismatch/clamped"] = reaches_clamp(policy.logp, prox, rollout)
        metrics["mismatch/ratio"], metrics["mismatch/ratio_sq"] = rho, rho.square()  # their means give the ESS
        loss, told = self.correction.correct(loss, policy.logp, tokens)
        metrics |= told
        if tokens.has("ref_logp"):
            # logged whatever the estimator in the loss, so that runs can be compared
            metrics["kl_ref"] = k3(policy.logp.detach(), tokens.ref_logp)
            metrics["kl_ref_capped"] = reaches_cap(policy.logp, tokens.ref_logp)
        if self.kl.in_loss:
            loss = loss + self.kl.current_coef(self) * self.kl.compute_penalty(policy, tokens)
        if policy.entropy is not None:
            metrics["entropy"] = policy.entropy
            loss = loss - self.adaptive_entropy.current_coef(self, self.entropy_coef) * policy.entropy
        return loss, metrics


def assign_advantages(alg: Algorithm, groups: list[Group]) -> list[Group]:
    """Compute the algorithm's advantages, of whole episodes of one player; exclude truncated ones where it says so."""
    if not isinstance(alg, PolicyGradient):
        return alg.compute_advantages(groups)
    # a group's mean is over episodes: one that is cut into many samples must not count more than once
    given, give_back = prepare_credit(groups)
    credited = alg.compute_advantages(given)
    check_samples(alg, given, credited)
    # After the advantages: the reward of a truncated completion still counts in the group's mean.
    return give_back(alg.overlong.exclude_truncated(credited))


def accepts_group(alg: Algorithm, group: Group) -> bool:
    """Return True if the algorithm trains on this group, for at least one player, with one sample per episode."""
    return any(map(alg.accept_group, prepare_credit([group])[0]))


def with_prox(policy: Policy, tokens: Tokens) -> Tokens:
    """Return tokens with `prox_logp`; with a single update per step it is the current policy's, detached."""
    return tokens if tokens.has("prox_logp") else tokens.replace(prox_logp=policy.logp.detach())


class TurnCredit(PolicyGradient):
    """Base of algorithms that credit either a whole episode or each turn."""

    credit: Literal["episode", "turn"] = "episode"
    """episode: every turn gets the return of the whole episode. turn: a turn gets the return from it on, of the
    environment's rewards per turn; the last turn earns the rest of the reward."""
    turn_discount: float = Field(1.0, ge=0, le=1)
    """Weight of the next turn's return in a turn's return, for credit: turn."""

    @property
    def shares_advantage(self) -> bool:
        """True if all tokens of an episode must share their advantage, because the loss multiplies them together."""
        return False

    @model_validator(mode="after")
    def credits_what_it_can(self) -> TurnCredit:
        if self.credit == "turn" and self.shares_advantage:
            raise ValueError(
                "this loss is one number per episode, and credit: turn gives each turn its own: leave it out"
            )
        if self.credit == "turn" and getattr(self, "gamma", 1.0) != 1:
            raise ValueError(
                "gamma discounts tokens, and credit: turn has one return for all of a turn: set turn_discount"
            )
        if self.credit == "episode" and self.turn_discount != 1:
            raise ValueError("turn_discount has no effect with credit: episode: set credit: turn")
        return self

    def turn_rewards(self, sample: Sample) -> Floats | None:
        """Return each turn's reward, [K], plus penalties for length and KL; None for a failed sample."""
        if sample.reward is None:
            return None
        return rewards_of_turns(sample, sample.reward + self.overlong.compute_penalty(sample), self.kl_rewards(sample))

    def turn_returns(self, sample: Sample) -> Floats | None:
        """Return the discounted return from each turn on, [K]; None for a failed sample."""
        rewards = self.turn_rewards(sample)
        return None if rewards is None else reward_to_go(rewards, self.turn_discount)


class GroupRelative(TurnCredit):
    """Base of algorithms whose advantages are rewards minus the group's mean, without a value model."""

    scale_rewards: ScaleRewards = "none"
    """Divide the centred reward by nothing, the group's or the step's standard deviation of rewards, or the group's
    mean reward (MaxRL)."""
    leave_one_out: bool = False
    """true: mean over the other samples of the group (RLOO). false: over all samples."""
    whiten: bool = False
    """Finally normalise the advantages of a step's tokens to mean 0 and variance 1; 0 outside the baseline."""
    dynamic_sampling: bool = False
    """Replace a group of equal rewards by another prompt (DAPO)."""

    @property
    def needs_siblings(self) -> bool:
        return True

    @property
    def baseline_origins(self) -> frozenset[Origin]:
        """Origins of the samples that the group's mean counts; the others are compared with it."""
        return frozenset({"policy"})

    def in_baseline(self, sample: Sample) -> bool:
        return sample.origin in self.baseline_origins

    def accept_group(self, group: Group) -> bool:
        group = [s for s in group if self.in_baseline(s)]
        if self.dynamic_sampling and self.credit == "turn":  # without the KL, which nobody has computed yet
            earned = [None if s.reward is None else rewards_of_turns(s, s.reward) for s in group]
            returns = [None if r is None else reward_to_go(r, self.turn_discount) for r in earned]
            return any(a.any() for a in turn_advantages(returns))
        # equal rewards: every advantage is 0, and the prompt would cost an update and teach nothing
        scored = {s.reward for s in group if s.reward is not None}
        return not self.dynamic_sampling or len(scored) > 1

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        credit = self._credit_turns(groups) if self.credit == "turn" else self._credit_episodes(groups)
        if self.whiten:
            samples = [s for g in groups for s in g]
            credit = whiten_tokens(samples, credit, [self.in_baseline(s) for s in samples])
        return with_advantages(groups, credit)

    def _credit_episodes(self, groups: list[Group]) -> list[float]:
        both = [[(self.penalised_reward(s), self.in_baseline(s)) for s in g] for g in groups]
        std = reward_std([reward for own in both for reward, counts in own if counts])
        credit = partial(group_advantages, scale=self.scale_rewards, leave_one_out=self.leave_one_out, batch_std=std)
        return [a for own in both for a in credit([r for r, _ in own], counted=[counts for _, counts in own])]

    def _credit_turns(self, groups: list[Group]) -> list[Floats]:
        returns = [[self.turn_returns(s) if self.in_baseline(s) else None for s in g] for g in groups]
        std = returns_std([r for g in returns for r in g])
        credit = partial(turn_advantages, scale=self.scale_rewards, leave_one_out=self.leave_one_out, batch_std=std)
        return spread_turns([s for g in groups for s in g], [a for g in returns for a in credit(g)])
