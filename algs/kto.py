"""KTO: training on completions that are good or bad, without pairs (https://arxiv.org/abs/2402.01306, Eq. 7-8).

For a completion y of x, labelled desirable (+1) or undesirable (-1):

    S  = sum_t [log pi - log pi_ref](y_t)
    z0 = max(0, mean over the update of S for mismatched pairs (x_i, y_i+1)), held back from the gradient
    L  = lambda_y (1 - sigmoid(beta (S - z0)))       desirable
    L  = lambda_y (1 - sigmoid(beta (z0 - S)))       undesirable

z0 is computed once over the whole update, before the split: it needs at least two rows. Choose the lambdas so that
lambda_D x (desirable rows) is 1 to 4/3 of lambda_U x (undesirable rows).

Others: TRL takes z0 over a micro-batch of each rank, so the loss depends on how an update is split.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from pydantic import Field, field_validator
from torch import Tensor

from algs.base import Algorithm, Metrics
from algs.credit import sum_terms
from algs.ops import sequence_sum
from algs.preference import preference_sign, require_norm, with_advantage_of
from core.types.samples import Group, LossNorm, Policy, Rows, Sample, ScoredColumn, Tokens


class KTO(Algorithm):
    loss_norm: LossNorm = "sequence"
    """sequence: every token of a completion has the completion's loss, and the tokens share its weight."""
    beta: float = Field(0.1, gt=0)
    desirable_weight: float = Field(1.0, gt=0)
    """lambda_D."""
    undesirable_weight: float = Field(1.0, gt=0)
    """lambda_U."""

    @field_validator("loss_norm")
    @classmethod
    def weighs_answers(cls, given: LossNorm) -> LossNorm:
        return require_norm("sequence", given)

    @property
    def rows(self) -> Rows:
        return "unpaired"

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        return frozenset({"ref_logp", "prox_logp"})

    def prepare_groups(self, groups: list[Group]) -> list[Group]:
        """Add a mismatched sample to every row: the prompt with the next row's completion, scored but untrained."""
        rows = [g[0] for g in groups]
        # the last row takes the first one's completion, so that every row has a mismatch
        return [[s, make_mismatched(s, after)] for s, after in zip(rows, rows[1:] + rows[:1], strict=True)]

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        """Set the advantage to +lambda_D or -lambda_U, and the reference point to z0."""
        sums = [sum_log_ratio(s) for g in groups for s in g if s.reward is None and not s.failure]
        z0 = max(0.0, sum(sums) / max(1, len(sums)))
        # The mismatched samples only served z0. Without a reward they would count as rows of the loss norm.
        kept = [[s for s in g if s.reward is not None or s.failure] for g in groups]
        kept = [
            [s.replace(columns=s.columns | {"reference_point": np.full_like(s.rollout_logp, z0)}) for s in g]
            for g in kept
        ]
        weights = {1.0: self.desirable_weight, -1.0: -self.undesirable_weight}
        return with_advantage_of(kept, lambda s: weights[preference_sign(s)])

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        gain = sequence_sum(policy.logp - tokens.ref_logp, tokens.seq_ids)  # [M]
        away = self.beta * tokens.advantage.sign() * (gain - tokens.reference_point)
        # 1 - sigmoid(x) is sigmoid(-x), which keeps its precision for large x.
        loss = tokens.advantage.abs() * (-away).sigmoid()
        right = (away > 0).to(gain.dtype)
        return loss, {"kto/z0": tokens.reference_point, "kto/accuracy": right}


def make_mismatched(first: Sample, second: Sample) -> Sample:
    """Join a row's prompt and another row's completion, with the images of each."""
    n, start = int(np.argmax(first.action_mask)), int(np.argmax(second.action_mask))
    ids = np.concatenate([first.token_ids[:n], second.token_ids[start:]])
    # Images of the second prompt stay behind with it; those within the completion move with their tokens.
    moved = (replace(p, begin=p.begin + n - start, end=p.end + n - start) for p in second.images if p.begin >= start)
    return Sample(
        prompt=first.prompt,
        token_ids=ids,
        action_mask=np.concatenate([np.zeros_like(first.action_mask[:n]), second.action_mask[start:]]),
        rollout_logp=np.zeros(len(ids), dtype=first.float_dtype),
        versions=np.full(len(ids), -1, dtype=np.int32),
        images=(*(p for p in first.images if p.end <= n), *moved),
    )


def sum_log_ratio(sample: Sample) -> float:
    """Sum log pi - log pi_ref over the completion, with pi the policy at the start of the update."""
    now, ref = (sample.columns[name][sample.loss_mask].astype(np.float64) for name in ("prox_logp", "ref_logp"))
    return sum_terms(now - ref)
