"""GSPO: the ratio and its clip belong to the whole sequence (https://arxiv.org/abs/2507.18071, Eq. 5-7, 13-14).

    s_b = (prod_t pi(a_t) / pi_prox(a_t)) ^ (1 / n_b)
    L_b = max(-s_b A_b, -clip(s_b, 1 - low, 1 + high) A_b)              form: sequence, shared by its tokens
    L_t = the same with s_b pi(a_t) / sg[pi(a_t)] in place of s_b       form: token, if A may vary in a sequence

The sequence is the episode; if it has several samples, the product is over the trained tokens of all.

The geometric mean changes far less than a token's ratio, so clip bounds are a few 1e-4. Related settings:
    LUSPO  loss_norm: sequence_sum, clip_low: 0.002, clip_high: 0.0025         https://arxiv.org/abs/2602.05261
    RLOO as TRL runs it  ratio: product, leave_one_out: true, clip_low: 0.2, clip_high: 0.2

Others: AReaL averages by token, which weights long completions more; OpenRLHF divides by the engine's policy
when a correction is on.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor

from algs.base import GroupRelative, Metrics
from algs.ops import clip_metrics, clipped_surrogate, sequence_ratio
from core.types.samples import LossNorm, Policy, Tokens

MOST_CLIP = 0.1


class GSPO(GroupRelative):
    loss_norm: LossNorm = "sequence"
    clip_low: float = Field(3e-4, gt=0, lt=1)
    clip_high: float = Field(4e-4, gt=0)
    form: Literal["sequence", "token"] = "sequence"
    ratio: Literal["geometric", "product"] = "geometric"

    @model_validator(mode="after")
    def clip_can_bind(self) -> GSPO:
        # A clip copied from a token loss would never act.
        if self.ratio == "geometric" and self.clip_high > MOST_CLIP:
            raise ValueError(
                f"clip_high={self.clip_high:g} never binds: a geometric mean over a sequence moves by thousandths "
                "(the paper has 4e-4); a token's clip belongs to grpo"
            )
        return self

    @property
    def whole_episodes(self) -> bool:
        return True

    @property
    def shares_advantage(self) -> bool:
        return self.form == "sequence"

    @property
    def not_on_policy(self) -> str:
        if self.ratio == "geometric":
            return ""
        return "the product's gradient is the same at each token and adds up over them: n times the weight"

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio = sequence_ratio(policy.logp, tokens.prox_logp, tokens.seq_ids, product=self.ratio == "product")
        if self.form == "token":
            # The value is s_b; a token's gradient flows only through its own log-probability (GSPO-token, Eq. 13-14).
            ratio = ratio.detach() * (policy.logp - policy.logp.detach()).exp()
        loss = clipped_surrogate(ratio, tokens.advantage, self.clip_low, self.clip_high)
        return loss, clip_metrics(ratio, tokens.advantage, self.clip_low, self.clip_high)
