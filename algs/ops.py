"""Building blocks for losses: pure functions of tensors, [M] in and [M] out, never reduced."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp() beyond this is no longer information; the gradient is zero outside, so how often it binds is logged."""

K3_CAP = 10.0


def importance_ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    """pi(a) / pi_old(a) per token, [M]; the log-ratio is clamped to +-20 before exp."""
    return (logp - old_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """max(-r A, -clip(r, 1-low, 1+high) A), [M]  (PPO, https://arxiv.org/abs/1707.06347, Eq. 7)."""
    return torch.maximum(-ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage)


def clip_metrics(ratio: Tensor, advantage: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Shares of tokens whose gradient the clip took away, above and below, each [M]."""
    return {
        "clip_frac_high": ((advantage > 0) & (ratio > 1 + high)).to(ratio.dtype),
        "clip_frac_low": ((advantage < 0) & (ratio < 1 - low)).to(ratio.dtype),
    }


def k2(logp: Tensor, other: Tensor) -> Tensor:
    """(log pi - log q)^2 / 2, [M]: biased in value, but on-policy its gradient is that of KL(pi || q)."""
    return (logp - other).square() / 2


def k3(logp: Tensor, other: Tensor) -> Tensor:
    """q/pi - 1 - log(q/pi), [M]: unbiased, never negative  (http://joschu.net/blog/kl-approx.html).

    Beyond d = log pi - log q = -10 the value goes on as a straight line: the gradient 1 - exp(-d) stays
    bounded and keeps its sign. A clamp of the exponent alone would there push the token further away.
    """
    d = logp - other
    inside = d.clamp(min=-K3_CAP)
    slope = 1 - math.exp(K3_CAP)
    return torch.expm1(-inside) + inside + slope * (d + K3_CAP).clamp(max=0.0)


def group_advantages(rewards: list[float | None], *, scale: float | None = None) -> list[float]:
    """Reward above the mean of one's siblings, divided by `scale` if given, in float64. [G] -> [G].

    A failed sample (None) is left out of the mean and gets 0. A group without two different rewards
    gets exactly 0, not rounding noise over epsilon.
    """
    scored = [r for r in rewards if r is not None]
    if len(scored) < 2 or max(scored) == min(scored):
        return [0.0] * len(rewards)
    mean = sum(scored) / len(scored)
    return [0.0 if r is None else (r - mean) / (scale if scale is not None else 1.0) for r in rewards]


def spread(rewards: list[float | None]) -> float:
    """Sample standard deviation (ddof 1) of the rewards that are there, plus 1e-6; float64."""
    scored = [r for r in rewards if r is not None]
    if len(scored) < 2:
        return 1.0
    mean = sum(scored) / len(scored)
    return (sum((r - mean) ** 2 for r in scored) / (len(scored) - 1)) ** 0.5 + 1e-6
