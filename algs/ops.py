"""Building blocks of losses: pure functions of tensors, [M] in and [M] out, never reduced."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from algs.reductions import Reduction, count, exact_sum

MAX_LOG_RATIO = 20.0
"""Limit of a log-ratio before exp(). The gradient outside is zero; `reaches_clamp` marks these tokens."""

K3_CAP = 10.0
"""Distance in nats from which k3 continues linearly; `reaches_cap` marks these tokens."""


def importance_ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    """Compute pi(a) / pi_old(a) per token, [M] -> [M]; the log-ratio is clamped to +-20 before exp."""
    # exp(20) is 5e8: finite in float32 even when squared, as for the effective sample size.
    return (logp - old_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def reaches_clamp(logp: Tensor, prox_logp: Tensor, rollout_logp: Tensor) -> Tensor:
    """Return 1 if any two of the three policies differ by MAX_LOG_RATIO or more, otherwise 0; [M] -> [M], detached."""
    three = torch.stack([logp.detach(), prox_logp, rollout_logp])
    return (three.amax(0) - three.amin(0) >= MAX_LOG_RATIO).to(rollout_logp.dtype)


def reaches_cap(logp: Tensor, other: Tensor) -> Tensor:
    """Return 1 if k3 is in the linear part, otherwise 0; [M] -> [M], detached."""
    return (logp.detach() - other <= -K3_CAP).to(other.dtype)


def sequence_sum(values: Tensor, seq_ids: Tensor) -> Tensor:
    """Compute the sum over each token's sequence, [M] -> [M]. A sequence is never split between micro-batches."""
    # one place per token is enough for all sequences; their number would have to be read from the device
    return torch.zeros_like(values).index_add(0, seq_ids, values)[seq_ids]


def sequence_mean(values: Tensor, seq_ids: Tensor) -> Tensor:
    """Compute the mean over the trained tokens of each token's sequence, [M] -> [M]."""
    return sequence_sum(values, seq_ids) / sequence_sum(torch.ones_like(values), seq_ids)


def sequence_ratio(logp: Tensor, old_logp: Tensor, seq_ids: Tensor, *, product: bool = False) -> Tensor:
    """Compute the ratio of each token's whole sequence, [M] -> [M].

    It is the product of the token ratios, or their geometric mean (GSPO, https://arxiv.org/abs/2507.18071, Eq. 7).
    """
    over = sequence_sum if product else sequence_mean
    # clamped after the sum: single tokens may be far off and cancel
    return over(logp - old_logp, seq_ids).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """Compute max(-r A, -clip(r, 1-low, 1+high) A), [M] -> [M]  (PPO, https://arxiv.org/abs/1707.06347, Eq. 7).

    `dual` bounds it if A < 0 and r > dual (dual-clip PPO, https://arxiv.org/abs/1912.09729).
    """
    # the larger loss of the two: a ratio beyond the bound has no gradient only if it went where A points
    loss = torch.maximum(-ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage)
    if dual is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -dual * advantage), loss)


def clip_metrics(ratio: Tensor, advantage: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Compute per token, [M] each: whether the upper or lower clip bound removed the gradient; and KL(old || pi)."""
    ratio = ratio.detach()
    return {
        "clip_frac_high": ((advantage > 0) & (ratio > 1 + high)).to(ratio.dtype),
        "clip_frac_low": ((advantage < 0) & (ratio < 1 - low)).to(ratio.dtype),
        # k3 with the old policy as sampler
        "approx_kl": ratio - 1 - ratio.log(),
    }


def k2(logp: Tensor, other: Tensor) -> Tensor:
    """Compute (log pi - log q)^2 / 2, [M] -> [M]: biased value; on-policy, the gradient is that of KL(pi || q)."""
    return (logp - other).square() / 2


def k3(logp: Tensor, other: Tensor) -> Tensor:
    """Compute q/pi - 1 - log(q/pi), [M] -> [M]: unbiased, never negative  (http://joschu.net/blog/kl-approx.html).

    Beyond d = log pi - log q = -10 the value continues linearly: the gradient 1 - exp(-d) stays bounded and keeps its
    sign. Clamping only the exponent would push the token further away there.
    """
    d = logp - other
    inside = d.clamp(min=-K3_CAP)
    # The slope of the formula at the cap, so that value and gradient are continuous there.
    slope = 1 - math.exp(K3_CAP)
    return torch.expm1(-inside) + inside + slope * (d + K3_CAP).clamp(max=0.0)


def weight_sums(weight: Tensor) -> dict[str, Reduction]:
    """Ask for the totals of `effective_sample_size`, from weights [M]: n, sum w and sum w^2."""
    weight = weight.detach()
    return {"n": count(weight), "w": exact_sum(weight), "w2": exact_sum(weight.square())}


def effective_sample_size(totals: dict[str, Tensor], prefix: str = "") -> Tensor:
    """Compute (sum w)^2 / (n sum w^2) of reduced `weight_sums` (Kish), in (0, 1]; 1 without tokens."""
    n, w, w2 = (totals[f"{prefix}{name}"] for name in ("n", "w", "w2"))
    return torch.where(n > 0, w.square() / (n * w2).clamp(min=1e-30), torch.ones_like(w))
