"""OPSD: the policy with the answer in its prompt teaches the policy without (https://arxiv.org/abs/2601.19897).

    A_t = log pi_teacher(a_t | prompt with the answer) - sg[log pi(a_t)]
    L_t = -keep_t u_t A_t + kl_coef (log u_t)^2,   u_t = pi(a_t) / pi_rollout(a_t), live
    keep_t = 0 where pi(a_t) < pi_rollout(a_t) - delta

The teacher is the policy itself at the start of the step, and no second model is loaded. There is no reward: it is
logged, and has no effect on training. Rows without an answer have no teacher, and are not trained on.

Others: prime-rl, whose loss this is, scores with the engine's weights at the time, which cannot be repeated.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator
from torch import Tensor

from algs.base import Metrics, PolicyGradient
from algs.ops import importance_ratio
from algs.teachers import Teacher, append_text, grade_tokens
from algs.terms import Correction
from core.types.samples import Group, Message, Policy, Sample, ScoredColumn, Tokens


class OPSD(PolicyGradient):
    correction: Correction = Correction(level="none")
    hint: str = "\n\nThe correct answer is {answer}. Answer in your own words."
    """Text after the last message of the teacher's prompt."""
    teacher: Literal["live", "start"] = "live"
    """live: the policy at the start of the step. start: its initial weights."""
    delta: float = Field(0.2, gt=0)
    kl_coef: float = Field(1e-3, ge=0)

    @field_validator("hint")
    @classmethod
    def hint_holds_the_answer(cls, hint: str) -> str:
        if "{answer}" not in hint:
            raise ValueError("the teacher would read what the policy reads: write {answer} where the answer is to be")
        return hint

    @model_validator(mode="after")
    def learns_from_the_teacher_alone(self) -> OPSD:
        if self.kl.in_reward or self.overlong.mode == "penalty":
            raise ValueError(
                "the reward has no effect on training: kl.place: reward and overlong.mode: penalty would do nothing"
            )
        return self

    @property
    def anchored_on_rollout(self) -> bool:
        return True

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        return super().required_columns | {"teacher_logp"}

    @property
    def teachers(self) -> dict[str, Teacher]:
        return {**super().teachers, "teacher_logp": Teacher(self.teacher, prompt=self.show_answer)}

    def show_answer(self, sample: Sample, group: Group) -> list[Message] | None:
        """Return the prompt with the answer; None without one."""
        if not sample.prompt.answer:
            return None
        hint = self.hint.replace("{answer}", sample.prompt.answer)
        return append_text(sample.prompt.messages, hint)

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        """Set the log-ratio of teacher and engine: the advantage on policy, for the log."""
        return [[grade_tokens(s, "teacher_logp") for s in g] for g in groups]

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        logp, log_ratio = policy.logp.detach(), policy.logp - tokens.rollout_logp
        advantage = tokens.teacher_logp - logp
        # tokens that the policy left since they were sampled are not moved further
        left = logp.exp() < tokens.rollout_logp.exp() - self.delta
        pushed = (importance_ratio(policy.logp, tokens.rollout_logp) * advantage).masked_fill(left, 0.0)
        metrics = {"teacher_kl": -advantage, "masked": left.to(logp.dtype)}
        return self.kl_coef * log_ratio.square() - pushed, metrics
