"""ORPO: odds-ratio preference optimisation (https://arxiv.org/abs/2403.07691, Eq. 6-7); no reference model.

    m(y) = mean_t log pi(y_t)                 log odds(y) = m(y) - log(1 - exp m(y))
    L    = NLL(y_w) - lam log sigmoid(log odds(y_w) - log odds(y_l))

NLL is the mean over all tokens of the update's chosen completions, the second term the mean over the pairs.

Others: TRL averages the NLL over the prompt's tokens too; we take the completion's, as the paper does.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from algs.base import Metrics
from algs.ops import sequence_mean, sequence_sum
from algs.preference import Pairwise, pair_metrics, pair_sum, preference_sign, with_advantage_of
from core.types.samples import Group, Policy, Tokens


class ORPO(Pairwise):
    lam: float = Field(0.1, gt=0)
    """Weight of the odds ratio."""

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        """Set advantages so that weight x advantage is 1 / (number of chosen tokens), negative for rejected tokens."""
        groups = super().compute_advantages(groups)
        sizes = [sum(s.n_trained for s in g) for g in groups]
        pairs = sum(n > 0 for n in sizes)
        chosen = sum(s.n_trained for g in groups for s in g if preference_sign(s) > 0)
        size_of = {id(s): n for g, n in zip(groups, sizes, strict=True) for s in g}
        # The norm `prompt` gives every token of a pair the weight 1 / (pairs x tokens of the pair); this undoes it.
        return with_advantage_of(groups, lambda s: preference_sign(s) * size_of[id(s)] * pairs / chosen)

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        mean = sequence_mean(policy.logp, tokens.seq_ids)  # [M]
        log_odds = mean - log1mexp(mean)
        signed = tokens.advantage.sign() * log_odds / sequence_sum(torch.ones_like(mean), tokens.seq_ids)
        is_chosen = tokens.advantage > 0
        # one sum each, so that the order of the two completions changes no bit
        margin = pair_sum(signed * is_chosen, tokens) + pair_sum(signed * ~is_chosen, tokens)
        odds_loss = -logsigmoid(margin)
        nll = -policy.logp * tokens.advantage.clamp(min=0)
        return nll + self.lam * odds_loss, pair_metrics(signed, tokens) | {"nll": nll, "odds_loss": odds_loss}


def log1mexp(x: Tensor) -> Tensor:
    """Compute log(1 - exp x) for x < 0 without loss of precision near 0 (Maechler 2012); x is clamped to <= -1e-7."""
    x = x.clamp(max=-1e-7)
    near = x > -0.6931
    # Each branch gets a harmless input outside its range: torch.where passes gradients of both, and 0 x nan is nan.
    at_near, at_far = torch.where(near, x, -torch.ones_like(x)), torch.where(near, -torch.ones_like(x), x)
    return torch.where(near, (-torch.expm1(at_near)).log(), torch.log1p(-at_far.exp()))
