"""BCO: binary classifier optimisation on completions that are good or bad (https://arxiv.org/abs/2404.04656, Eq. 9-10).

    S     = beta sum_t [log pi - log pi_ref](y_t)
    L     = -log sigmoid(+-(S - delta))           + desirable, - undesirable
    delta = mean of S over all completions of the steps before; 0 in the first

Others: TRL moves delta before it uses it, by the micro-batch at hand, so the loss depends on how an update is split.
TRL's `bco_pair` (here dpo with form: bco) has no delta, and sums the two losses of a pair.
"""

from __future__ import annotations

from pydantic import Field, field_validator
from torch import Tensor
from torch.nn.functional import logsigmoid

from algs.base import Algorithm, Metrics
from algs.ops import sequence_sum
from algs.preference import preference_sign, require_norm, with_advantage_of
from algs.state import StepSeen
from core.types.arrays import Floats
from core.types.samples import Group, LossNorm, Policy, Rows, ScoredColumn, Tokens


class BCO(Algorithm):
    loss_norm: LossNorm = "sequence"
    """sequence: every token of a completion has the completion's loss, and the tokens share its weight."""
    beta: float = Field(0.1, gt=0)
    """Strength of the KL constraint to the reference; larger keeps the policy closer."""

    @field_validator("loss_norm")
    @classmethod
    def weighs_answers(cls, given: LossNorm) -> LossNorm:
        return require_norm("sequence", given)

    @property
    def rows(self) -> Rows:
        return "unpaired"

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        return frozenset({"ref_logp"})

    def initial_state(self) -> dict[str, float | Floats]:
        return {"delta": 0.0, "completions": 0.0}

    def next_state(self, step: StepSeen) -> dict[str, float | Floats]:
        before, new = float(self.state["completions"]), step.n_samples
        mean = (float(self.state["delta"]) * before + step.mean("bco/reward") * new) / (before + new)
        return {"delta": mean, "completions": before + new}

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        return with_advantage_of(groups, preference_sign)

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        reward = self.beta * sequence_sum(policy.logp - tokens.ref_logp, tokens.seq_ids)  # [M]
        away = tokens.advantage.sign() * (reward - float(self.state["delta"]))
        right = (away > 0).to(reward.dtype)
        return -logsigmoid(away), {"bco/reward": reward.detach(), "bco/accuracy": right}
