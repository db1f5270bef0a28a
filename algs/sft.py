"""SFT: negative log-likelihood of the trained tokens.

L_t = -log pi(y_t | x, y_<t)
dft: true    L_t = -sg[pi(y_t)] log pi(y_t)      (dynamic fine-tuning, https://arxiv.org/abs/2508.05629)
"""

from __future__ import annotations

from torch import Tensor

from algs.base import Algorithm, Metrics
from core.types.samples import Policy, Tokens


class SFT(Algorithm):
    dft: bool = False

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        weight = policy.logp.detach().exp() if self.dft else 1.0
        return -weight * policy.logp, {}
