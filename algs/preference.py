"""What algorithms share that learn from a preferred and a rejected answer to the same prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pydantic import field_validator
from torch import Tensor

from algs.base import Algorithm, Metrics, with_advantages
from algs.ops import sequence_sum
from core.types import Group, LossNorm, Rows, Sample, Tokens


class Pairwise(Algorithm):
    """Learns from groups of one chosen and one rejected answer; a pair is never split between micro-batches."""

    loss_norm: LossNorm = "prompt"
    """prompt: its loss stands at each token of a pair, which share its weight."""

    @field_validator("loss_norm")
    @classmethod
    def weighs_pairs(cls, given: LossNorm) -> LossNorm:
        return only("prompt", given)

    @property
    def rows(self) -> Rows:
        return "pairs"

    @property
    def whole_groups(self) -> bool:
        return True

    def share(self, sample: Sample) -> float:
        """What each of the answer's tokens adds to the pair's margin, before its sign."""
        return 1.0

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        """Advantage +share for the chosen answer and -share for the rejected one; half a pair is not learnt from."""
        groups = [g if is_pair(g) else [replace(s, excluded=[True] * len(s.action_mask)) for s in g] for g in groups]
        return with_advantage_of(groups, lambda s: sign(s) * self.share(s))


def only(norm: LossNorm, given: LossNorm) -> LossNorm:
    if given != norm:
        raise ValueError(f"the loss is one number per answer or pair, and only {norm} weighs it rightly: leave it out")
    return given


def is_pair(group: Group) -> bool:
    rewards = sorted(s.reward for s in group if s.reward is not None and any(s.loss_mask))
    return len(group) == len(rewards) == 2 and rewards[0] < rewards[1]


def sign(sample: Sample) -> float:
    """+1 for a chosen or desirable answer (reward 1), -1 for the other (reward 0)."""
    return 1.0 if sample.reward else -1.0


def with_advantage_of(groups: list[Group], one: Callable[[Sample], float]) -> list[Group]:
    """The groups with the same advantage at every learnt token of a sample."""
    return with_advantages(groups, [[one(s)] * n if (n := sum(s.loss_mask)) else [] for g in groups for s in g])


def pair_sum(signed: Tensor, tokens: Tokens) -> Tensor:
    """Each token gets the sum over its pair, [M]: of what speaks for the chosen answer, less for the rejected."""
    return sequence_sum(signed, tokens.group_ids)


def pair_metrics(signed: Tensor, tokens: Tokens) -> Metrics:
    """Of each pair, [M] each: what speaks for either answer, their margin, and if it is positive (a tie is not)."""
    signed = signed.detach()
    chosen = pair_sum(signed * (tokens.advantage > 0), tokens)
    margin = pair_sum(signed, tokens)
    return {
        "pair/chosen": chosen,
        "pair/rejected": chosen - margin,
        "pair/margin": margin,
        "pair/accuracy": (margin > 0).to(signed.dtype),
    }
