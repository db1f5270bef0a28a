"""Base class and terms of algorithms on pairs of a chosen and a rejected completion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from pydantic import field_validator
from torch import Tensor
from torch.nn.functional import logsigmoid

from algs.base import Algorithm, Metrics, with_advantages
from algs.ops import MAX_LOG_RATIO, sequence_sum
from core.types.samples import Group, LossNorm, Rows, Sample, Tokens

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]


class Pairwise(Algorithm):
    """Base of algorithms on pairs. A pair is never split between micro-batches."""

    loss_norm: LossNorm = "prompt"
    """prompt: every token of a pair has the pair's loss, and the tokens share its weight."""

    @field_validator("loss_norm")
    @classmethod
    def weighs_pairs(cls, given: LossNorm) -> LossNorm:
        return require_norm("prompt", given)

    @property
    def rows(self) -> Rows:
        return "pairs"

    @property
    def whole_groups(self) -> bool:
        return True

    def token_share(self, sample: Sample) -> float:
        """Return the factor of each token of the completion in the pair's margin, without the sign."""
        return 1.0

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        """Set the advantage to +token_share (chosen) or -token_share (rejected); exclude incomplete pairs."""
        groups = [g if is_pair(g) else [s.replace(excluded=np.ones_like(s.action_mask)) for s in g] for g in groups]
        return with_advantage_of(groups, lambda s: preference_sign(s) * self.token_share(s))


def require_norm(norm: LossNorm, given: LossNorm) -> LossNorm:
    if given != norm:
        raise ValueError(
            f"the loss is one number per completion or pair, and only {norm} weights it correctly: leave it out"
        )
    return given


def is_pair(group: Group) -> bool:
    rewards = sorted(s.reward for s in group if s.reward is not None and s.n_trained)
    return len(group) == len(rewards) == 2 and rewards[0] < rewards[1]


def preference_sign(sample: Sample) -> float:
    """Return +1 for a chosen or desirable completion (reward 1), otherwise -1 (reward 0)."""
    return 1.0 if sample.reward else -1.0


def with_advantage_of(groups: list[Group], compute: Callable[[Sample], float]) -> list[Group]:
    """Set a constant advantage on all trained tokens of each sample."""
    return with_advantages(groups, [compute(s) if s.n_trained else 0.0 for g in groups for s in g])


def discount_length(groups: list[Group], decay: float) -> list[Group]:
    """Scale the advantages of the tokens by which a completion is longer than the other one of its pair."""

    def scale(sample: Sample, group: Group) -> Sample:
        assert sample.advantage is not None
        shorter = min(one.n_trained for one in group)
        share = np.where(np.cumsum(sample.loss_mask) <= shorter, 1.0, decay)
        return sample.with_advantage(sample.advantage * share)

    return [[scale(s, g) for s in g] for g in groups]


def f_divergence(gained: Tensor, divergence: Divergence) -> Tensor:
    """Compute f' of a completion's ratio, without constants, from its log, [M] -> [M]: for reverse KL, the log itself.

    Source: https://arxiv.org/abs/2309.16240, Table 1.
    """
    match divergence:
        case "reverse_kl":
            return gained
        case "forward_kl":
            return -(-gained).clamp(max=MAX_LOG_RATIO).exp()
        case "js":
            return logsigmoid(gained)
        case "alpha":  # of 0.5
            return -2 * (-gained / 2).clamp(max=MAX_LOG_RATIO).exp()


def pair_sum(signed: Tensor, tokens: Tokens) -> Tensor:
    """Compute the sum of `signed` over each token's pair, [M] -> [M]: chosen minus rejected."""
    return sequence_sum(signed, tokens.group_ids)


def pair_metrics(signed: Tensor, tokens: Tokens) -> Metrics:
    """Compute metrics of each token's pair, [M] each: both sums, the margin, and whether it is positive."""
    # Detached: metrics must not keep the graph of a micro-batch alive.
    signed = signed.detach()
    chosen = pair_sum(signed * (tokens.advantage > 0), tokens)
    margin = pair_sum(signed, tokens)
    return {
        "pair/chosen": chosen,
        "pair/rejected": chosen - margin,
        "pair/margin": margin,
        "pair/accuracy": (margin > 0).to(signed.dtype),
    }
