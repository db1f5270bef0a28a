"""MiniLLM: reverse KL to a teacher over whole sequences (https://arxiv.org/abs/2306.08543, Eq. 4-6).

    r_t = log p_teacher(y_t) - log pi_prox(y_t)
    L_t = -u_t R_{t+1} + KL(pi || p_teacher)(. | x, y_<t),    u_t = pi(y_t) / pi_rollout(y_t), live
    R_{t+1} = mean of r over the later trained tokens (length_norm), or their sum

The first term is the policy gradient of what a token leads to, the second the exact gradient of the token's own KL. The
reward is logged and has no effect on training.

Others: TRL counts token t itself in R, which its own KL counts already, leaves R out by default (gamma = 0), and lets
the gradient into it.
"""

from __future__ import annotations

import numpy as np
from pydantic import model_validator
from torch import Tensor

from algs.base import Metrics, PolicyGradient
from algs.credit import with_advantages
from algs.divergences import kl_divergence
from algs.ops import importance_ratio
from algs.teachers import Teacher
from algs.terms import Correction
from core.types.arrays import Floats
from core.types.measures import Measure
from core.types.samples import Group, Policy, Sample, ScoredColumn, Tokens


class MiniLLM(PolicyGradient):
    teacher: str
    """Path of the teacher model."""
    length_norm: bool = True
    """Mean over the later tokens instead of their sum, which grows with the length."""
    correction: Correction = Correction(level="none")

    @property
    def anchored_on_rollout(self) -> bool:
        return True

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        columns: frozenset[ScoredColumn] = frozenset({"teacher_logp", "prox_logp"})
        return super().required_columns | columns

    @property
    def teachers(self) -> dict[str, Teacher]:
        return {**super().teachers, "teacher_logp": Teacher(self.teacher)}

    @property
    def measures(self) -> dict[str, Measure]:
        own = Measure(lambda s, at: kl_divergence(s, at.teacher("teacher_logp")), teachers=("teacher_logp",))
        return {**super().measures, "teacher_kl": own}

    @model_validator(mode="after")
    def learns_from_the_teacher_alone(self) -> MiniLLM:
        if self.kl.in_reward or self.overlong.mode == "penalty":
            raise ValueError(
                "the reward has no effect on training: kl.place: reward and overlong.mode: penalty would do nothing"
            )
        return self

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        return with_advantages(groups, [self.later_rewards(s) for g in groups for s in g])

    def later_rewards(self, sample: Sample) -> Floats:
        """Return R_{t+1} of each trained token, [n]; 0 after the last."""
        n = sample.n_trained
        if not n:
            return np.zeros(0)
        teacher, old = (sample.columns[c][sample.loss_mask].astype(np.float64) for c in ("teacher_logp", "prox_logp"))
        r = teacher - old
        later = np.append(np.cumsum(r[:0:-1])[::-1], 0.0)
        return later / np.maximum(np.arange(n)[::-1], 1) if self.length_norm else later

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio = importance_ratio(policy.logp, tokens.rollout_logp)
        return -ratio * tokens.advantage + policy.teacher_kl, {"teacher_kl": policy.teacher_kl}
