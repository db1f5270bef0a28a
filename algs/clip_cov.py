"""Clip-Cov: PPO without a random few of the tokens that cost entropy (https://arxiv.org/abs/2505.22617, Eq. 10-11).

    c_t = (A_t - mean A) (log pi(a_t) - mean log pi)                    means over the tokens of the update
    L_t = PPO's clipped loss, and 0 for max(1, fraction x tokens) of the candidates

Candidates have cov_above < c_t < cov_below, and PPO's clip does not bind. A hash of the tokens up to a
candidate decides whether it is dropped, so no order, micro-batch or rank has an effect.

Others: verl and SkyRL take means and draw with torch.randperm in each micro-batch.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from algs.base import GroupRelative, Metrics
from algs.kl_cov import covariance
from algs.ops import clip_metrics, clipped_surrogate, importance_ratio
from algs.reductions import Stages, count, exact_sum, kth
from core.types.arrays import Floats
from core.types.samples import Group, Policy, Sample, Tokens

KEY = "clip_key"
"""Column of random keys in [0, 1): the smallest among the candidates are dropped."""


class ClipCov(GroupRelative):
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    cov_above: float = 1.0
    cov_below: float = 5.0
    """Bounds of a candidate's covariance."""
    fraction: float = Field(2e-4, ge=0, le=1)
    """Part of the update's tokens to drop."""
    seed: int = 0

    @property
    def not_on_policy(self) -> str:
        return "some tokens are dropped at random"

    def prepare_update(self, groups: list[Group]) -> list[Group]:
        return [[s.replace(columns=s.columns | {KEY: draw_keys(s, self.seed)}) for s in g] for g in groups]

    def totals(self, policy: Policy, tokens: Tokens) -> Stages:
        lp, advantage = policy.logp, tokens.advantage
        t = yield {"n": count(lp), "advantage": exact_sum(advantage), "logp": exact_sum(lp)}
        cov = covariance(lp, advantage, t)
        ratio = importance_ratio(lp, tokens.prox_logp if tokens.has("prox_logp") else lp)
        clipped = clip_metrics(ratio, advantage, self.clip_low, self.clip_high)
        is_free = clipped["clip_frac_high"] + clipped["clip_frac_low"] == 0
        candidates = is_free & (cov > self.cov_above) & (cov < self.cov_below)
        n = max(1, int(self.fraction * int(t["n"])))
        yield {"dropped": kth(-tokens.column(KEY), k=n, where=candidates)}

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio = importance_ratio(policy.logp, tokens.prox_logp)
        loss = clipped_surrogate(ratio, tokens.advantage, self.clip_low, self.clip_high)
        dropped = tokens.first["dropped"] >= tokens.totals["dropped"]
        metrics = clip_metrics(ratio, tokens.advantage, self.clip_low, self.clip_high)
        return torch.where(dropped, 0.0, loss), metrics | {"dropped": dropped.to(loss.dtype)}


def draw_keys(sample: Sample, seed: int) -> Floats:
    """Return a key in [0, 1) per token, [L], that depends on the seed, the prompt and the tokens up to this one."""
    place = np.arange(len(sample.token_ids), dtype=np.uint64)
    own = mix(sample.token_ids.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9) + place)
    name = np.frombuffer(sample.prompt.id.encode(), dtype=np.uint8).astype(np.uint64)
    start = mix(name * np.uint64(0x94D049BB133111EB) + np.arange(len(name), dtype=np.uint64)).sum(dtype=np.uint64)
    # as many bits as a float32 holds
    keys = mix(np.cumsum(own) + start + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)) >> np.uint64(40)
    return (keys / 2**24).astype(sample.float_dtype)


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter numbers over all 64 bits (splitmix64, https://prng.di.unimi.it/splitmix64.c)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
