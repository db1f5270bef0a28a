"""SDPO: the policy learns from itself with a solution in its prompt (https://arxiv.org/abs/2601.20802).

    k_t = log pi(a_t) - log pi_teacher(a_t | prompt with a solved sibling)
    L_t = min(sg[pi(a_t) / pi_prox(a_t)], max_weight) sg[k_t] log pi(a_t)

The expected gradient of sg[k_t] log pi is that of KL(pi || teacher) at each token, on sampled tokens alone. The teacher
is a moving average of the policy. It reads the best other reply of the group whose reward is at least `threshold`.
Samples without such a sibling have no teacher, and are not trained on.

Others: the paper's main form is the KL over the whole vocabulary or its top k, and the teacher also reads the feedback
of an environment. TRL has this form as sampled_token, with weights below 2.
"""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator
from torch import Tensor

from algs.base import Metrics, PolicyGradient
from algs.ops import importance_ratio
from algs.teachers import Teacher, append_text, grade_tokens
from core.types.samples import Group, LossNorm, Message, Policy, Sample, ScoredColumn, Tokens


class SDPO(PolicyGradient):
    loss_norm: LossNorm = "sequence"
    threshold: float = 1.0
    """Least reward of a sibling that is shown to the teacher."""
    shown: str = "\n\nCorrect solution:\n\n{solution}\n\nCorrectly solve the original question."
    """Text after the last message of the teacher's prompt."""
    max_weight: float = Field(2.0, gt=0)
    ema: float = Field(0.05, gt=0, lt=1)
    """Rate at which the teacher follows the policy in a step."""

    @field_validator("shown")
    @classmethod
    def text_holds_the_solution(cls, shown: str) -> str:
        if "{solution}" not in shown:
            raise ValueError("the teacher would see no solution: write {solution} where it is to be")
        return shown

    @model_validator(mode="after")
    def learns_from_the_teacher_alone(self) -> SDPO:
        if self.kl.in_reward or self.overlong.mode == "penalty":
            raise ValueError(
                "the reward only chooses solutions: kl.place: reward and overlong.mode: penalty would do nothing"
            )
        return self

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        return super().required_columns | {"teacher_logp"}

    @property
    def teachers(self) -> dict[str, Teacher]:
        return {**super().teachers, "teacher_logp": Teacher("start", ema=self.ema, prompt=self.show_solution)}

    @property
    def needs_siblings(self) -> bool:
        return True

    def show_solution(self, sample: Sample, group: Group) -> list[Message] | None:
        """Return the prompt with the best other solution of its group; None if there is none."""
        others = [s for s in group if s is not sample and (s.episode is None or s.episode != sample.episode)]
        solved = [s for s in others if s.reward is not None and s.reward >= self.threshold]
        if not solved:
            return None
        # of equal rewards the one whose tokens come first, so that the order of the group does not matter
        best = min(solved, key=lambda s: (-(s.reward or 0.0), s.token_ids.tolist()))
        solution = self.shown.replace("{solution}", best.completion or "")
        return append_text(sample.prompt.messages, solution)

    def accept_group(self, group: Group) -> bool:
        return any(self.show_solution(s, group) is not None for s in group if s.n_trained)

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        """Set the log-ratio of teacher and engine: the advantage on policy, for the log."""
        return [[grade_tokens(s, "teacher_logp") for s in g] for g in groups]

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        logp = policy.logp.detach()
        distance = logp - tokens.teacher_logp
        weight = importance_ratio(logp, tokens.prox_logp).clamp(max=self.max_weight)
        return weight * distance * policy.logp, {"teacher_kl": distance}
