"""DPO: direct preference optimisation (https://arxiv.org/abs/2305.18290, Eq. 7), and related losses.

For a chosen completion y_w and a rejected completion y_l of the same prompt, over trained tokens only:

    h = sum_t [log pi - log pi_ref](y_w,t) - sum_t [log pi - log pi_ref](y_l,t)
    sigmoid   L = -log sigmoid(beta h)
    hinge     L = max(0, 1 - beta h)                                         https://arxiv.org/abs/2309.06657
    ipo       L = (h - 1 / (2 beta))^2                                       https://arxiv.org/abs/2310.12036, Eq. 17
    robust    L = [-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)] / (1 - 2 e)   https://arxiv.org/abs/2403.00409
    exo       L = KL(sigmoid(+-beta h) || 1 - e, e)                          https://arxiv.org/abs/2402.00856, Eq. 16
    discopop  L = (1 - g) -log sigmoid(beta h) + g exp(-beta h)              https://arxiv.org/abs/2406.08414, Eq. 5
              with g = sigmoid(beta h / 0.05)

with e = label_smoothing. Forms of the two sums w and l, whose difference is h:
    apo_zero  L = 1 - sigmoid(beta w) + sigmoid(beta l)                      https://arxiv.org/abs/2408.06266, Eq. 7
    apo_down  L = 1 - sigmoid(beta h) + sigmoid(beta w)                      https://arxiv.org/abs/2408.06266, Eq. 8
    nca       L = -log sigmoid(beta w) - (log sigmoid(-beta w) + log sigmoid(-beta l)) / 2    https://arxiv.org/abs/2402.05369
    bco       L = -log sigmoid(beta w) - log sigmoid(-beta l)                https://arxiv.org/abs/2404.04656
    sppo      L = (w - 1 / (2 beta))^2 + (l + 1 / (2 beta))^2                https://arxiv.org/abs/2405.00675, Eq. 4.7

Related losses are settings:
    conservative (cDPO)   form: sigmoid, label_smoothing: 0.1
                          L = -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)
    length-normalised     length_norm: true, beta: 5            each completion's sum becomes the mean over its tokens
    IPO as its authors run it   form: ipo, length_norm: true
    SimPO                 reference_free: true, length_norm: true, beta: 2, target_margin: 1
                          L = -log sigmoid(beta h - target_margin)           https://arxiv.org/abs/2405.14734
    f-DPO                 divergence: forward_kl, js or alpha: h = f'(w) - f'(l)     https://arxiv.org/abs/2309.16240
    Iterative RPO         nll_coef: 1, adds the mean over y_w's tokens of -log pi    https://arxiv.org/abs/2404.19733
    LD-DPO                length_decay: 0.5, the weight of a completion's tokens beyond the length of the shorter one
                          https://arxiv.org/abs/2409.06411

If pi = pi_ref, h = 0 and the sigmoid loss is log 2. `pair/margin` is h without beta; `pair/chosen` and `pair/rejected`
are the two sums. If both decrease together, the model unlearns both completions.

Others: TRL's `ipo` takes token means (length_norm) without saying so, OpenRLHF sums; TRL's `sigmoid` ignores
label_smoothing, and takes its NLL (`sft`) over all chosen tokens of a micro-batch. Robust DPO has no lower bound.
`form: bco` has no running mean delta, as in TRL's `bco_pair`; the algorithm `bco` has it.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import logsigmoid

from algs.base import Metrics
from algs.ops import MAX_LOG_RATIO, sequence_sum
from algs.preference import Divergence, Pairwise, discount_length, f_divergence, pair_metrics, pair_sum
from core.types.samples import Group, Policy, Sample, ScoredColumn, Tokens


class DPO(Pairwise):
    form: Literal[
        "sigmoid", "hinge", "ipo", "robust", "exo", "discopop", "apo_zero", "apo_down", "nca", "bco", "sppo"
    ] = "sigmoid"
    beta: float = Field(0.1, gt=0)
    """Strength of the KL constraint to the reference; larger keeps the policy closer."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed fraction of pairs with swapped labels, for sigmoid, robust and exo."""
    length_norm: bool = False
    """Use means over a completion's tokens instead of sums."""
    reference_free: bool = False
    """Omit log pi_ref; no reference model is loaded."""
    target_margin: float = Field(0.0, ge=0)
    """Target margin of the chosen completion, for sigmoid: SimPO's gamma."""
    divergence: Divergence = "reverse_kl"
    """Divergence from the reference that the margin stands for; alpha is 0.5."""
    nll_coef: float = Field(0.0, ge=0)
    """Weight of the chosen completion's mean negative log-likelihood."""
    length_decay: float = Field(1.0, ge=0, le=1)
    """Weight in the sums of the tokens by which a completion is longer than the other one of its pair."""

    @model_validator(mode="after")
    def belongs_to_its_form(self) -> DPO:
        if self.label_smoothing and self.form not in ("sigmoid", "robust", "exo"):
            raise ValueError(
                f"label_smoothing belongs to the forms sigmoid, robust and exo, not to {self.form}: leave it out"
            )
        if self.form == "exo" and not self.label_smoothing:
            raise ValueError("form: exo divides by label_smoothing: set it, such as 0.1")
        if self.target_margin and (self.form != "sigmoid" or self.label_smoothing):
            raise ValueError("target_margin belongs to the form sigmoid without label_smoothing: leave it out")
        if self.length_norm and self.length_decay < 1:
            raise ValueError("length_decay is for sums, and length_norm takes means: leave one of them out")
        return self

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        return frozenset() if self.reference_free else frozenset({"ref_logp"})

    def token_share(self, sample: Sample) -> float:
        return 1 / sample.n_trained if self.length_norm else 1.0

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        groups = super().compute_advantages(groups)
        return groups if self.length_decay == 1 else discount_length(groups, self.length_decay)

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        gained = policy.logp
        if not self.reference_free:
            gained = gained - tokens.ref_logp
        # The advantage is +-token_share, so the sum over a pair is the margin.
        signed = tokens.advantage * gained
        # by sequence: with length_decay 0 the last tokens of a chosen completion have the advantage 0
        is_chosen = sequence_sum(tokens.advantage, tokens.seq_ids) > 0
        chosen, rejected = pair_sum(signed * is_chosen, tokens), -pair_sum(signed * ~is_chosen, tokens)
        loss = self.compare(*(f_divergence(gain, self.divergence) for gain in (chosen, rejected)))
        if self.nll_coef:
            # every token of the pair has the pair's mean, so that their weights sum to one
            share = is_chosen / sequence_sum(torch.ones_like(signed), tokens.seq_ids)
            loss = loss - self.nll_coef * pair_sum(policy.logp * share, tokens)
        return loss, pair_metrics(signed, tokens)

    def compare(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Compute the loss of each token's pair from the two sums, [M] -> [M]."""
        h, beta, smooth = chosen - rejected, self.beta, self.label_smoothing
        x = beta * h - self.target_margin
        match self.form:
            case "sigmoid":
                return -(1 - smooth) * logsigmoid(x) - smooth * logsigmoid(-x)
            case "robust":
                return (-(1 - smooth) * logsigmoid(x) + smooth * logsigmoid(-x)) / (1 - 2 * smooth)
            case "hinge":
                return (1 - x).clamp(min=0)
            case "ipo":
                return (h - 1 / (2 * beta)).square()
            case "exo":
                won = x.sigmoid() * (logsigmoid(x) - math.log(1 - smooth))
                return won + (-x).sigmoid() * (logsigmoid(-x) - math.log(smooth))
            case "discopop":
                gate = (x / 0.05).sigmoid()  # live
                # the exponential would overflow where the gate is closed
                return -(1 - gate) * logsigmoid(x) + gate * (-x).clamp(max=MAX_LOG_RATIO).exp()
            case "apo_zero":
                return 1 - (beta * chosen).sigmoid() + (beta * rejected).sigmoid()
            case "apo_down":
                return 1 - x.sigmoid() + (beta * chosen).sigmoid()
            case "nca":
                return -logsigmoid(beta * chosen) - (logsigmoid(-beta * chosen) + logsigmoid(-beta * rejected)) / 2
            case "bco":
                return -logsigmoid(beta * chosen) - logsigmoid(-beta * rejected)
            case "sppo":
                return (chosen - 1 / (2 * beta)).square() + (rejected + 1 / (2 * beta)).square()
