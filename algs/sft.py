"""SFT: negative log-likelihood of the learnt tokens.

L_t = -log pi(y_t | x, y_<t)
"""

from __future__ import annotations

from torch import Tensor

from algs.base import Algorithm, Metrics
from core.types import Policy, Tokens


class SFT(Algorithm):
    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return -policy.logp, {}
