"""On-policy distillation: the student samples, the teacher grades every token
(https://thinkingmachines.ai/blog/on-policy-distillation; https://arxiv.org/abs/2306.13649).

    A_t = -coef (log pi_rollout(a_t) - log pi_teacher(a_t))           the reverse KL of this token, discount 0
    L_t = -u_t A_t,  u_t = pi(a_t) / pi_rollout(a_t), live

While pi is the policy that sampled, the expected gradient is that of KL(pi || teacher) at each token of the student's
own text. The reward is logged and has no effect on training. The teacher must have the student's tokenizer, and its
log-probabilities are taken at the sampling temperature.

Others: back-propagating log pi - log pi_teacher itself, as some do, has an expected gradient of zero.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field, model_validator
from torch import Tensor

from algs.base import Metrics, PolicyGradient
from algs.ops import importance_ratio
from algs.teachers import Teacher
from algs.terms import Correction
from core.types.samples import Group, Policy, Sample, ScoredColumn, Tokens


class OPD(PolicyGradient):
    teacher: str
    """Path of the teacher model."""
    coef: float = Field(1.0, gt=0)
    correction: Correction = Correction(level="none")

    @property
    def anchored_on_rollout(self) -> bool:
        return True

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        columns: frozenset[ScoredColumn] = frozenset({"teacher_logp"})
        return super().required_columns | columns

    @property
    def teachers(self) -> dict[str, Teacher]:
        return {**super().teachers, "teacher_logp": Teacher(self.teacher)}

    @model_validator(mode="after")
    def learns_from_the_teacher_alone(self) -> OPD:
        if self.kl.in_reward or self.overlong.mode == "penalty":
            raise ValueError(
                "the reward has no effect on training: kl.place: reward and overlong.mode: penalty would do nothing"
            )
        return self

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        def grade_tokens(s: Sample) -> Sample:
            if s.failure:  # never scored
                return s.with_advantage(0.0)
            return s.with_advantage(-self.coef * (s.rollout_logp.astype(np.float64) - s.columns["teacher_logp"]))

        return [[grade_tokens(s) for s in g] for g in groups]

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        # Live, not detached: at ratio 1 the gradient is that of log pi, and it stays unbiased while the policy moves.
        ratio = importance_ratio(policy.logp, tokens.rollout_logp)
        return -ratio * tokens.advantage, {"teacher_kl": -tokens.advantage / self.coef}
