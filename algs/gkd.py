"""GKD: generalised knowledge distillation on the student's own text (https://arxiv.org/abs/2306.13649, Eq. 1, 3).

    L_t = D(p_teacher || p_student)(. | x, y_<t),  y sampled from the student
    D   = beta KL(q || M) + (1 - beta) KL(p || M),  M = beta q + (1 - beta) p          the whole vocabulary
    beta: 0   KL(teacher || student)      beta: 1   KL(student || teacher)

The distributions are compared at every token, at the sampling temperature, and no gradient goes through the sampling.
The reward is logged and has no effect on training. The teacher must have the student's tokenizer.

Top-k distillation is a setting: divergence: {beta: 0, topk: 20}, with a tail or without (algs/divergences.py).

Others: verl drops the rest of the vocabulary and clamps log-probabilities at -10, which stops the gradient of the
tokens that need it most; TRL clamps the mass of the top k at 1 - 1e-7. Nobody multiplies by the temperature squared.
"""

from __future__ import annotations

from pydantic import model_validator
from torch import Tensor

from algs.base import Metrics, PolicyGradient, with_advantages
from algs.divergences import Divergence
from algs.teachers import Teacher
from algs.terms import Correction
from core.types.measures import Measure
from core.types.samples import Group, Policy, Tokens


class GKD(PolicyGradient):
    teacher: str
    """Path of the teacher model."""
    divergence: Divergence = Divergence()
    correction: Correction = Correction(level="none")

    @property
    def teachers(self) -> dict[str, Teacher]:
        return {**super().teachers, "teacher": Teacher(self.teacher)}

    @property
    def measures(self) -> dict[str, Measure]:
        compare = Measure(lambda s, at: self.divergence.compute(s, at.teacher("teacher")), teachers=("teacher",))
        return {**super().measures, "divergence": compare}

    @model_validator(mode="after")
    def learns_from_the_teacher_alone(self) -> GKD:
        if self.kl.in_reward or self.overlong.mode == "penalty":
            raise ValueError(
                "the reward has no effect on training: kl.place: reward and overlong.mode: penalty would do nothing"
            )
        return self

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        return with_advantages(groups, [0.0 for g in groups for _ in g])

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return policy.divergence, {}
