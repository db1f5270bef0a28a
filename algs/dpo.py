"""DPO: direct preference optimisation (https://arxiv.org/abs/2305.18290, Eq. 7), and related losses.

For a chosen completion y_w and a rejected completion y_l of the same prompt, over trained tokens only:

    h = sum_t [log pi - log pi_ref](y_w,t) - sum_t [log pi - log pi_ref](y_l,t)
    sigmoid   L = -log sigmoid(beta h)
    hinge     L = max(0, 1 - beta h)                                         https://arxiv.org/abs/2309.06657
    ipo       L = (h - 1 / (2 beta))^2                                       https://arxiv.org/abs/2310.12036, Eq. 17
    robust    L = [-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)] / (1 - 2 e)   https://arxiv.org/abs/2403.00409

with e = label_smoothing. Related losses are settings:
    conservative (cDPO)   form: sigmoid, label_smoothing: 0.1
                          L = -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)
    length-normalised     length_norm: true, beta: 5            each completion's sum becomes the mean over its tokens
    IPO as its authors run it   form: ipo, length_norm: true
    SimPO                 reference_free: true, length_norm: true, beta: 2, target_margin: 1
                          L = -log sigmoid(beta h - target_margin)           https://arxiv.org/abs/2405.14734

If pi = pi_ref, h = 0 and the sigmoid loss is log 2. `pair/margin` is h without beta; `pair/chosen` and `pair/rejected`
are the two sums. If both decrease together, the model unlearns both completions.

Others: TRL's `ipo` takes token means (length_norm) without saying so, OpenRLHF sums; TRL's `sigmoid` ignores
label_smoothing, its `exo_pair` and others are not here. Robust DPO has no lower bound.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import logsigmoid

from algs.base import Metrics
from algs.preference import Pairwise, pair_metrics, pair_sum
from core.types.samples import Policy, Sample, ScoredColumn, Tokens


class DPO(Pairwise):
    form: Literal["sigmoid", "hinge", "ipo", "robust"] = "sigmoid"
    beta: float = Field(0.1, gt=0)
    """Strength of the KL constraint to the reference; larger keeps the policy closer."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed fraction of pairs with swapped labels, for sigmoid and robust."""
    length_norm: bool = False
    """Use means over a completion's tokens instead of sums."""
    reference_free: bool = False
    """Omit log pi_ref; no reference model is loaded."""
    target_margin: float = Field(0.0, ge=0)
    """Target margin of the chosen completion, for sigmoid: SimPO's gamma."""

    @model_validator(mode="after")
    def belongs_to_its_form(self) -> DPO:
        if self.label_smoothing and self.form not in ("sigmoid", "robust"):
            raise ValueError(
                f"label_smoothing belongs to the forms sigmoid and robust, not to {self.form}: leave it out"
            )
        if self.target_margin and (self.form != "sigmoid" or self.label_smoothing):
            raise ValueError("target_margin belongs to the form sigmoid without label_smoothing: leave it out")
        return self

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        return frozenset() if self.reference_free else frozenset({"ref_logp"})

    def token_share(self, sample: Sample) -> float:
        return 1 / sample.n_trained if self.length_norm else 1.0

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        gained = policy.logp
        if not self.reference_free:
            gained = gained - tokens.ref_logp
        # The advantage is +-token_share, so the sum over a pair is the margin h.
        signed = tokens.advantage * gained
        h = pair_sum(signed, tokens)
        x, smooth = self.beta * h - self.target_margin, self.label_smoothing
        match self.form:
            case "sigmoid":
                loss = -(1 - smooth) * logsigmoid(x) - smooth * logsigmoid(-x)
            case "robust":
                loss = (-(1 - smooth) * logsigmoid(x) + smooth * logsigmoid(-x)) / (1 - 2 * smooth)
            case "hinge":
                loss = (1 - x).clamp(min=0)
            case "ipo":
                loss = (h - 1 / (2 * self.beta)).square()
        return loss, pair_metrics(signed, tokens)
