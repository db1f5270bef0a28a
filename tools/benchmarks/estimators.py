"""Estimators of mixed groups: bias and spread of the gradient, exactly. python -m tools.benchmarks.estimators

A bandit with six actions, of which a rare one is good. A group has 6 samples of the policy, and 2 of another policy
that knows the good action. Every possible group is listed with its probability, so that expectation and standard
deviation are exact. direction: cosine between the expected and the true gradient; size: ratio of their norms; sd: root
of the summed variances. Rows with the name of an algorithm are computed by the code that trains; the others are
formulas of methods that FeynRL refuses or does not have.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement, product

import numpy as np
import torch
from numpy.typing import NDArray

from algs.base import PolicyGradient, assign_advantages
from algs.luffy import LUFFY
from algs.objective import compute_objective
from algs.rloo import RLOO
from core.types.arrays import DOUBLE
from core.types.batch import Policy
from core.types.samples import Group, Origin, Prompt, Sample, make_sample
from data_feeds.packing.batches import plan_update
from tools.benchmarks.matrix_table import make_table

Numbers = NDArray[np.float64]
LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -2.5])
REWARDS = np.array([0.0, 0.0, 0.2, 0.0, 0.0, 1.0])
OTHER = np.array([0.02, 0.02, 0.03, 0.03, 0.1, 0.8])
"""Probabilities of the other policy."""
HEAD = ("estimator", "direction", "size", "sd")


@dataclass(frozen=True)
class Groups:
    """All groups of samples of the policy and of the other policy, whatever their order."""

    n_own: int = 6
    n_others: int = 2

    @cached_property
    def policy(self) -> Numbers:
        weights = np.exp(LOGITS)
        return weights / weights.sum()

    @cached_property
    def _listed(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        own, other = (combinations_with_replacement(range(len(LOGITS)), n) for n in (self.n_own, self.n_others))
        return list(product(own, other))

    @cached_property
    def probability(self) -> Numbers:
        """Probability of each group, [B]."""
        return np.array([_chance(own, self.policy) * _chance(other, OTHER) for own, other in self._listed])

    @cached_property
    def actions(self) -> NDArray[np.int64]:
        """Actions of each group, the policy's first, [B, samples]."""
        return np.array([[*own, *other] for own, other in self._listed], dtype=np.int64)

    @cached_property
    def rewards(self) -> Numbers:
        return REWARDS[self.actions]

    @cached_property
    def ratios(self) -> Numbers:
        """Exact importance weight of each sample, [B, samples]; 1 for the policy's own."""
        ratios = (self.policy / OTHER)[self.actions]
        ratios[:, : self.n_own] = 1.0
        return ratios

    def measure(self, coefs: Numbers) -> tuple[float, float, float]:
        """Return direction, size and sd of sum_i coef_i grad log pi(a_i), for coefs [B, samples]."""
        scores = np.eye(len(LOGITS)) - self.policy  # [action, parameter]
        gradients = np.einsum("bk,bkj->bj", coefs, scores[self.actions[:, : coefs.shape[1]]])
        mean = self.probability @ gradients
        variance = float(self.probability @ (gradients**2).sum(1) - mean @ mean)
        true = self.policy * (REWARDS - self.policy @ REWARDS)
        norm, of_true = float(np.linalg.norm(mean)), float(np.linalg.norm(true))
        return float(mean @ true) / (norm * of_true), norm / of_true, math.sqrt(variance)


def _chance(actions: Sequence[int], probabilities: Numbers) -> float:
    """Return the probability of a multiset of actions."""
    counts = Counter(actions)
    orders = math.factorial(len(actions)) / math.prod(map(math.factorial, counts.values()))
    return orders * math.prod(float(probabilities[action]) ** n for action, n in counts.items())


def find_coefficients(alg: PolicyGradient, groups: Groups, *, origin: Origin) -> Numbers:
    """Return the factor of each sample's score in the gradient that an algorithm ascends, [B, samples]."""
    made = assign_advantages(alg, [_make_group(groups, b, origin) for b in range(len(groups.actions))])
    most = sum(len(s.token_ids) for group in made for s in group)
    plan = plan_update(made, alg.loss_norm, most, padded=False, whole_episodes=True, terms=alg.terms)
    [[batch]] = plan.batches(torch.float64)
    logp = torch.from_numpy(np.log(groups.policy))[batch.labels - 1].requires_grad_()
    loss = compute_objective(alg, Policy(logp=logp), batch).loss
    (batch.tokens.weight * loss).sum().backward()
    assert logp.grad is not None
    coefs = np.zeros(groups.actions.size)
    [[chosen]] = plan.bins
    # the batch has the samples in another order; each has one trained token
    coefs[np.array(chosen)] = -logp.grad.numpy()
    # of one group, where the update has all of them
    return coefs.reshape(groups.actions.shape) * len(groups.actions)


def _make_group(groups: Groups, b: int, origin: Origin) -> Group:
    return [
        _make_sample(groups, int(action), float(reward), "policy" if i < groups.n_own else origin)
        for i, (action, reward) in enumerate(zip(groups.actions[b], groups.rewards[b], strict=True))
    ]


def _make_sample(groups: Groups, action: int, reward: float, origin: Origin) -> Sample:
    probability = {"policy": float(groups.policy[action]), "other": float(OTHER[action]), "demonstration": 1.0}[origin]
    return make_sample(
        prompt=Prompt(id="bandit", messages=[]),
        token_ids=[0, 1 + action],
        action_mask=[False, True],
        rollout_logp=[0.0, math.log(probability)],
        versions=[-1, 0 if origin == "policy" else -1],
        reward=reward,
        origin=origin,
        dtype=DOUBLE,
    )


def list_estimators(groups: Groups) -> dict[str, Numbers]:
    """Return the coefficients of every estimator, [B, samples], by name."""
    rewards, ratios, n_own = groups.rewards, groups.ratios, groups.n_own
    n = n_own + groups.n_others
    own = rewards[:, :n_own]
    alone = (own - _mean_of_others(own)) / n_own
    mixed = rewards - _mean_of_others(rewards)
    scaled = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True, ddof=1) + 1e-6)
    clipped = np.where((ratios < 0.8) & (scaled < 0) | (ratios > 1.2) & (scaled > 0), 0.0, ratios)
    imitated = np.maximum(rewards - own.mean(1, keepdims=True), 0) / groups.n_others
    imitated[:, :n_own] = 0.0
    exact, cut = ({"level": "sequence", "high": high} for high in (math.inf, 2.0))
    return {
        "own samples only, leave-one-out": alone,
        "own samples, baseline of the mixed group (leave-one-out)": mixed[:, :n_own] / n_own,
        "mixed, w = pi/mu, mixed baseline": ratios * mixed / n,
        "RLOO: w = pi/mu, baseline of the own samples": find_coefficients(
            RLOO.model_validate({"correction": exact}), groups, origin="other"
        ),
        "RLOO: w = min(pi/mu, 2), own baseline": find_coefficients(
            RLOO.model_validate({"correction": cut}), groups, origin="other"
        ),
        "log-probabilities unknown, taken as w = 1": mixed / n,
        "clipped at 0.2, merged z-scores": clipped * scaled / n,
        "LUFFY: shaped, merged z-scores": find_coefficients(
            LUFFY.model_validate({"scale_rewards": "group"}), groups, origin="demonstration"
        ),
        "NLL on samples above the own mean": imitated,
    }


def _mean_of_others(rewards: Numbers) -> Numbers:
    return (rewards.sum(1, keepdims=True) - rewards) / (rewards.shape[1] - 1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.estimators", description=(__doc__ or "").split("\n")[0]
    )
    parser.parse_args(argv)
    groups = Groups()
    measured = {name: groups.measure(coefs) for name, coefs in list_estimators(groups).items()}
    print(make_table(HEAD, [[name, *(f"{x:.3f}" for x in numbers)] for name, numbers in measured.items()]), end="")


if __name__ == "__main__":
    main()
