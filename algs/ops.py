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


def sequence_sum(values: Tensor, seq_ids: Tensor) -> Tensor:
    """Each token gets the sum over its sequence, [M]. A sequence is never split between micro-batches."""
    n = int(seq_ids.max()) + 1 if len(seq_ids) else 0
    return values.new_zeros(n).index_add(0, seq_ids, values)[seq_ids]


def sequence_mean(values: Tensor, seq_ids: Tensor) -> Tensor:
    """Each token gets the mean over the learnt tokens of its sequence, [M]."""
    return sequence_sum(values, seq_ids) / sequence_sum(torch.ones_like(values), seq_ids)


def sequence_ratio(logp: Tensor, old_logp: Tensor, seq_ids: Tensor, *, product: bool = False) -> Tensor:
    """Ratio of a whole sequence, the same at each of its tokens, [M].

    The product of the token ratios, or their geometric mean (GSPO, https://arxiv.org/abs/2507.18071, Eq. 7).
    """
    over = sequence_sum if product else sequence_mean
    return over(logp - old_logp, seq_ids).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """max(-r A, -clip(r, 1-low, 1+high) A), [M]  (PPO, https://arxiv.org/abs/1707.06347, Eq. 7).

    `dual` bounds it where A < 0 and r > dual (dual-clip PPO, https://arxiv.org/abs/1912.09729).
    """
    loss = torch.maximum(-ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage)
    if dual is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -dual * advantage), loss)


def clip_metrics(ratio: Tensor, advantage: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Shares of tokens whose gradient the clip took away, above and below; and KL(old || pi), each [M]."""
    ratio = ratio.detach()
    return {
        "clip_frac_high": ((advantage > 0) & (ratio > 1 + high)).to(ratio.dtype),
        "clip_frac_low": ((advantage < 0) & (ratio < 1 - low)).to(ratio.dtype),
        "approx_kl": ratio - 1 - ratio.log(),
    }


def k1(logp: Tensor, other: Tensor) -> Tensor:
    """log pi - log q, [M]: unbiased in value; as a loss its expected gradient is zero."""
    return logp - other


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


def weight_sums(weight: Tensor) -> dict[str, Tensor]:
    """What the effective sample size needs of one micro-batch: n, sum w and sum w^2, scalars to be added up."""
    weight = weight.detach()
    return {"n": weight.new_tensor(float(weight.numel())), "w": weight.sum(), "w2": weight.square().sum()}


def effective_sample_size(totals: dict[str, Tensor], prefix: str = "") -> Tensor:
    """(sum w)^2 / (n sum w^2) of added-up `weight_sums`, in (0, 1]; 1 where there is no token."""
    n, w, w2 = (totals[f"{prefix}{name}"] for name in ("n", "w", "w2"))
    return torch.where(n > 0, w.square() / (n * w2).clamp(min=1e-30), torch.ones_like(w))
