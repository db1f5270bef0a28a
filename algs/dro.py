"""DRO: direct reward optimisation, a squared log-ratio in place of a clip (https://arxiv.org/abs/2405.19107).

    level: token       L_t = -A log pi(a_t) + tau/2 (log pi(a_t) - log pi_anchor(a_t))^2
    level: sequence    L   = -A sum_t log pi(a_t) + tau/2 (sum_t [log pi(a_t) - log pi_ref(a_t)])^2

The sequence level is the published objective (its policy part; Eq. 3 of Kimi k1.5, https://arxiv.org/abs/2501.12599):
each token's gradient sees the drift of the whole sequence. It needs loss_norm: sequence_sum.

anchor: prox, the trainer's policy when the step began; rollout, the engine's; ref, the initial model.

Others: verl (anchor: prox) and Tinker (anchor: rollout, summed instead of averaged) square per token. SkyRL's DRO is
another objective of that name, an exponential tilt of PPO.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor

from algs.base import GroupRelative, Metrics
from algs.ops import sequence_mean, sequence_sum
from core.types.samples import Policy, ScoredColumn, Tokens


class DRO(GroupRelative):
    tau: float = Field(0.2, gt=0)
    level: Literal["token", "sequence"] = "token"
    anchor: Literal["prox", "rollout", "ref"] = "prox"

    @property
    def not_on_policy(self) -> str:
        return "the squared log-ratio to another policy adds to the gradient" if self.anchor == "ref" else ""

    @property
    def anchored_on_rollout(self) -> bool:
        return self.anchor == "rollout"

    @property
    def whole_episodes(self) -> bool:
        return self.level == "sequence" or super().whole_episodes

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        columns: frozenset[ScoredColumn] = frozenset({"ref_logp"} if self.anchor == "ref" else ())
        return super().required_columns | columns

    @model_validator(mode="after")
    def weighs_whole_sequences(self) -> DRO:
        if self.level == "sequence" and (self.loss_norm != "sequence_sum" or self.credit == "turn"):
            raise ValueError("level: sequence is one number per episode: set loss_norm: sequence_sum, credit: episode")
        return self

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        anchor = {"prox": "prox_logp", "rollout": "rollout_logp", "ref": "ref_logp"}[self.anchor]
        drift = policy.logp - getattr(tokens, anchor)
        square = drift.square()
        if self.level == "sequence":
            # sum^2 / n for each of n tokens, so that the sequence has sum^2
            square = sequence_sum(drift, tokens.seq_ids) * sequence_mean(drift, tokens.seq_ids)
        return self.tau / 2 * square - tokens.advantage * policy.logp, {"drift": drift.detach()}
