"""VESPO: a soft weight of whole sequences in place of a clip (https://arxiv.org/abs/2602.10693).

    W   = prod_t pi(a_t) / pi_anchor(a_t)                          of the sequence's trained tokens
    L_t = -sg[W^k exp(lambda (1 - W))] A log pi(a_t)

k and lambda have two values each, for A >= 0 and for A < 0. The weight is 1 at W = 1, largest at W = k / lambda, and
falls to 0 on both sides, so a sequence that is far away teaches little. log W is kept within [log 1e-8, 20].

anchor: rollout, the engine's policy; then no correction. prox: the trainer's policy when the step began.

Others: TRL multiplies W by truncated token ratios of the correction (rollout_cap: 2), which makes it the ratio of
neither policy.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from algs.base import GroupRelative, Metrics
from algs.ops import MAX_LOG_RATIO, sequence_sum
from core.types.samples import Policy, Tokens

MIN_LOG_WEIGHT = math.log(1e-8)


class VESPO(GroupRelative):
    k_pos: float = Field(2.0, gt=0)
    k_neg: float = Field(3.0, gt=0)
    lambda_pos: float = Field(3.0, gt=0)
    lambda_neg: float = Field(2.0, gt=0)
    anchor: Literal["rollout", "prox"] = "prox"

    rollout_cap: float | None = Field(None, gt=0)
    """Multiply W by min(pi_prox / pi_rollout, rollout_cap) of each token, for anchor: prox; then no correction."""

    @property
    def anchored_on_rollout(self) -> bool:
        return self.anchor == "rollout" or self.rollout_cap is not None

    @model_validator(mode="after")
    def caps_what_it_multiplies(self) -> VESPO:
        if self.anchor == "rollout" and self.rollout_cap is not None:
            raise ValueError("rollout_cap is for anchor: prox, W is pi / pi_rollout already: leave it out")
        return self

    @property
    def whole_episodes(self) -> bool:
        return True

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        old = tokens.prox_logp if self.anchor == "prox" else tokens.rollout_logp
        drift = policy.logp.detach() - old
        if self.rollout_cap is not None:
            drift = drift + (tokens.prox_logp - tokens.rollout_logp).clamp(max=math.log(self.rollout_cap))
        log_w = sequence_sum(drift, tokens.seq_ids).clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)
        up = tokens.advantage >= 0
        k = torch.where(up, self.k_pos, self.k_neg)
        lam = torch.where(up, self.lambda_pos, self.lambda_neg)
        weight = (k * log_w + lam * (1 - log_w.exp())).exp()
        return -weight * tokens.advantage * policy.logp, {"sequence_weight": weight}
