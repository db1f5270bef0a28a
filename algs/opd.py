"""On-policy distillation: the student samples, the teacher grades every token
(https://thinkingmachines.ai/blog/on-policy-distillation; https://arxiv.org/abs/2306.13649).

    A_t = -coef (log pi_rollout(a_t) - log pi_teacher(a_t))           the reverse KL of this token, discount 0
    L_t = -u_t A_t,  u_t = pi(a_t) / pi_rollout(a_t), live

    early: gamma     A_t is multiplied by 1 + gamma (1 - sum_{s<t} |A_s| / sum_s |A_s|)   (IW-OPD, arXiv 2606.22600)
    ratio: none      L_t = -A_t log pi(a_t)

While pi is the policy that sampled, the expected gradient is that of KL(pi || teacher) at each token of the student's
own text. The reward is logged and has no effect on training. The teachers must have the student's tokenizer, and their
log-probabilities are taken at the sampling temperature.

Others: back-propagating log pi - log pi_teacher itself, as some do, has an expected gradient of zero.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from algs.base import Metrics, PolicyGradient
from algs.ops import importance_ratio
from algs.teachers import Teacher
from algs.terms import Correction
from core.types.arrays import Floats
from core.types.samples import Group, Policy, Sample, ScoredColumn, Tokens


class OPD(PolicyGradient):
    teacher: str | dict[str, str]
    """Path of the teacher model; or of several, by data set. Samples of other data sets are not trained on."""
    coef: float = Field(1.0, gt=0)
    early: float = Field(0.0, ge=0)
    """Additional weight of the first tokens of a sequence; the weight falls to 1 as the teacher's objections add up."""
    ratio: Literal["rollout", "none"] = "rollout"
    """Anchor of the live ratio; none: no ratio, and a correction may be set."""
    correction: Correction = Correction(level="none")

    @property
    def anchored_on_rollout(self) -> bool:
        return self.ratio == "rollout"

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        columns: frozenset[ScoredColumn] = frozenset({"teacher_logp"})
        return super().required_columns | columns

    @property
    def teachers(self) -> dict[str, Teacher]:
        if isinstance(self.teacher, str):
            return {**super().teachers, "teacher_logp": Teacher(self.teacher)}
        several = {
            f"teacher of {source}": Teacher(path, sources=(source,), column="teacher_logp")
            for source, path in self.teacher.items()
        }
        return {**super().teachers, **several}

    @field_validator("teacher")
    @classmethod
    def there_is_a_teacher(cls, teacher: str | dict[str, str]) -> str | dict[str, str]:
        if not teacher or not all(teacher.values() if isinstance(teacher, dict) else [teacher]):
            raise ValueError("name the path of a model, or a path for each data set")
        return teacher

    @model_validator(mode="after")
    def learns_from_the_teacher_alone(self) -> OPD:
        if self.kl.in_reward or self.overlong.mode == "penalty":
            raise ValueError(
                "the reward has no effect on training: kl.place: reward and overlong.mode: penalty would do nothing"
            )
        return self

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        def grade_tokens(s: Sample) -> Sample:
            if not s.n_trained:  # never scored
                return s.with_advantage(0.0)
            graded = s.columns["teacher_logp"] - s.rollout_logp.astype(np.float64)
            return s.with_advantage(self.coef * graded * self.weigh_early(np.where(s.loss_mask, graded, 0.0)))

        return [[grade_tokens(s) for s in g] for g in groups]

    def weigh_early(self, graded: Floats) -> Floats:
        """Return the weight of each token, [L], from the log-ratio to the teacher, 0 where no token is trained on."""
        objections = np.abs(graded)
        before = np.cumsum(objections) - objections
        return 1 + self.early * (1 - before / max(objections.sum(), 1e-8))

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        # Live, not detached: at ratio 1 the gradient is that of log pi, and it stays unbiased while the policy moves.
        ratio = importance_ratio(policy.logp, tokens.rollout_logp) if self.ratio == "rollout" else policy.logp
        return -ratio * tokens.advantage, {"teacher_kl": tokens.rollout_logp - tokens.teacher_logp}
