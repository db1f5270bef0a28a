"""Terms of every policy-gradient algorithm: importance correction, KL penalty, entropy bonus, overlong penalty."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field, model_validator
from torch import Tensor

from algs.divergences import kl_divergence
from algs.ops import importance_ratio, k2, k3, sequence_mean, sequence_ratio
from algs.state import Controller, State, Stateful, StepSeen
from algs.teachers import START, Teacher
from core.strict_model import StrictModel
from core.types.measures import At, Measure
from core.types.samples import Group, Policy, Sample, ScoredColumn, Tokens


class Correction(StrictModel):
    """Importance weights between the rollout engine and the trainer: rho = pi_prox / pi_rollout, detached."""

    level: Literal["none", "token", "sequence", "geometric"] = "token"
    """Ratio to use: each token's, the product over the sequence, or the geometric mean over the sequence."""
    mode: Literal["truncate", "clip", "mask"] = "truncate"
    """truncate: min(rho, high). clip: rho clamped to [low, high]. mask: rho if low <= rho <= high, otherwise 0."""
    low: float = Field(default=0.5, ge=0)
    """Lower bound of rho, for clip and mask."""
    high: float = Field(default=2.0, gt=0, allow_inf_nan=True)
    """Upper bound of rho; .inf: none."""
    token_high: float = Field(default=2.0, gt=0)
    """Cap of a token's weight in a kept sequence: min(token's rho, token_high). For level geometric with mask."""
    max_drift: float | None = Field(default=None, gt=0)
    """Tokens with A < 0 have no gradient in a sequence whose mean of log(pi_rollout / pi) is above this, in nats
    (DeepSeek-V3.2's off-policy sequence masking, https://arxiv.org/abs/2512.02556, Eq. 9); unset: no limit. With any
    level, none too. They stay in the mean."""
    drift_from: Literal["rollout", "prox"] = "rollout"
    """Policy from which max_drift measures: the engine's, as published, or the proximal one, which misses the
    difference between the two."""

    @model_validator(mode="after")
    def bounds_are_in_order(self) -> Correction:
        if self.mode != "truncate" and self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}, so every token would be masked: swap them")
        return self

    @property
    def by_sequence(self) -> bool:
        """True if sequences are compared as a whole, so that the methods need seq_ids."""
        return self.level in ("sequence", "geometric") or self.max_drift is not None

    def correct(self, loss: Tensor, logp: Tensor, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the corrected policy loss of each token, [M] -> [M], and metrics. logp: the current policy's, [M]."""
        metrics: dict[str, Tensor] = {}
        if self.level != "none":
            seq_ids = tokens.seq_ids if self.by_sequence else None
            weight = self.compute_weights(tokens.prox_logp, tokens.rollout_logp, seq_ids)
            metrics["mismatch/weight"] = weight
            loss = loss * weight
        if self.max_drift is not None:
            drifted = self.find_drifted(logp, tokens)
            metrics["mismatch/drifted"] = drifted.to(loss.dtype)
            # not a product: 0 x inf is nan
            loss = loss.masked_fill(drifted, 0.0)
        return loss, metrics

    def find_drifted(self, logp: Tensor, tokens: Tokens) -> Tensor:
        """Return True for the tokens that `max_drift` leaves without a gradient, [M]."""
        assert self.max_drift is not None
        anchor = tokens.rollout_logp if self.drift_from == "rollout" else tokens.prox_logp
        drift = sequence_mean(anchor - logp.detach(), tokens.seq_ids)
        return (tokens.advantage < 0) & (drift > self.max_drift)

    def compute_weights(self, prox_logp: Tensor, rollout_logp: Tensor, seq_ids: Tensor | None) -> Tensor:
        """Compute the factor of each token's policy term, [M] -> [M], detached, for any level but none."""
        token = importance_ratio(prox_logp, rollout_logp)
        rho = token
        if self.level in ("sequence", "geometric"):
            assert seq_ids is not None
            rho = sequence_ratio(prox_logp, rollout_logp, seq_ids, product=self.level == "sequence")
        match self.mode:
            case "truncate":
                return rho.clamp(max=self.high)
            case "clip":
                return rho.clamp(self.low, self.high)
            case "mask":
                # A geometric mean near 1 decides which sequences are kept, but says nothing on single tokens, so they
                # keep their rho.
                kept = token.clamp(max=self.token_high) if self.level == "geometric" else rho
                return kept * ((rho >= self.low) & (rho <= self.high))


class KL(Controller):
    """Penalty on divergence from the reference model; place and estimator determine the gradient."""

    coef: float = Field(default=0.0, ge=0)
    """Coefficient of the penalty; 0: no reference model is loaded. With target, that of the first step."""
    target: float | None = Field(default=None, gt=0)
    """Desired KL from the reference per token, in nats, to which the coefficient adapts: after each step of n samples
    it is multiplied by 1 + clip(KL / target - 1, -0.2, 0.2) n / horizon (https://arxiv.org/abs/1909.08593, Eq. 2-3).
    Unset: it stays."""
    horizon: int = Field(default=10_000, ge=1)
    """Samples in which the coefficient changes by a fifth at most, for target."""
    place: Literal["loss", "reward"] = "loss"
    """loss: added to the loss, per token. reward: subtracted from the reward, before advantages are computed."""
    estimator: Literal[
        "auto", "k1", "k2", "k3", "k3plus", "unbiased", "k2_is", "score", "abs", "full", "full_forward"
    ] = "auto"
    """auto: unbiased in the loss, k1 in the reward. Gradient in the loss under on-policy samples: k2 and k3plus (value
    of k3) that of KL(pi||ref); k3 that of KL(ref||pi), as published with GRPO; unbiased (live ratio x k3,
    DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, Eq. 7) that of KL(pi||ref), also off-policy. k2_is (ratio held,
    x k2, https://arxiv.org/abs/2512.21852) and score (ratio held, x log(pi/ref) held, x log pi) have the gradient of
    unbiased, and other values. abs: |log(pi/ref)|, no KL. full: no estimate, the sum over the vocabulary of
    KL(pi||ref) at each token; full_forward: of KL(ref||pi)."""
    reset_every: int | None = Field(default=None, ge=1)
    """Number of steps after which the reference is the policy again (ProRL, https://arxiv.org/abs/2505.24864, 2.3.2);
    unset: never."""
    reset_optimizer: bool = False
    """true: a reset also clears the moments of the optimizer, as in ProRL."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Rate of a reference that is a moving average of the policy's weights; unset: it rests."""
    ema_every: int = Field(default=1, ge=1)
    """Number of steps between two moves of the average."""

    @model_validator(mode="after")
    def gradient_is_a_kl_gradient(self) -> KL:
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError("k1 in the loss has an expected gradient of zero: use unbiased, k2, or place: reward")
        if self.place == "reward" and self.estimator not in ("auto", "k1"):
            raise ValueError(
                f"{self.estimator} in the reward has a gradient that is not the KL's, only k1's is unbiased there: "
                "use estimator: k1"
            )
        return self

    @model_validator(mode="after")
    def reference_moves_as_told(self) -> KL:
        if self.reset_optimizer and self.reset_every is None:
            raise ValueError("reset_optimizer has no effect without a reset: set reset_every, or leave it out")
        if self.ema_every > 1 and self.ema is None:
            raise ValueError("ema_every has no effect without ema: set ema, or leave it out")
        if self.coef == 0 and self.reference.moves:
            raise ValueError("coef is 0, so no reference would move: set coef, or leave out reset_every and ema")
        return self

    @property
    def reference(self) -> Teacher:
        """The reference model."""
        return Teacher(
            START,
            ema=self.ema,
            ema_every=self.ema_every,
            reset_every=self.reset_every,
            with_optimizer=self.reset_optimizer,
        )

    @model_validator(mode="after")
    def adapts_a_penalty(self) -> KL:
        if self.target is not None and self.coef == 0:
            raise ValueError("target adapts coef, and 0 stays 0: set coef, such as to 0.1")
        return self

    def current_coef(self, alg: Stateful) -> float:
        """Return the coefficient of the step."""
        return self.coef if self.target is None else float(alg.state["kl_coef"])

    def initial_entries(self) -> dict[str, float]:
        return {} if self.target is None else {"kl_coef": self.coef}

    def next_entries(self, state: State, step: StepSeen) -> dict[str, float]:
        if self.target is None:
            return {}
        error = min(0.2, max(-0.2, step.mean("kl_ref") / self.target - 1))
        return {"kl_coef": float(state["kl_coef"]) * (1 + error * step.n_samples / self.horizon)}

    @property
    def in_loss(self) -> bool:
        return self.coef > 0 and self.place == "loss"

    @property
    def in_reward(self) -> bool:
        return self.coef > 0 and self.place == "reward"

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        """Columns that the penalty needs."""
        if self.in_reward:
            return frozenset({"ref_logp", "prox_logp"})
        return frozenset({"ref_logp"} if self.in_loss else ())

    @property
    def measures(self) -> dict[str, Measure]:
        """Exact divergence from the reference, read as policy.kl, if that is the estimator."""
        if not self.in_loss or self.estimator not in ("full", "full_forward"):
            return {}
        of_policy = self.estimator == "full"

        def exact(s: Tensor, at: At) -> Tensor:
            ref = at.teacher("ref_logp")
            return kl_divergence(s, ref) if of_policy else kl_divergence(ref, s)

        return {"kl": Measure(exact, teachers=("ref_logp",))}

    def compute_penalty(self, policy: Policy, tokens: Tokens) -> Tensor:
        """Compute the penalty of each token, [M], with gradient."""
        logp = policy.logp
        match self.estimator:
            case "full" | "full_forward":
                return policy.kl
            case "k2":
                return k2(logp, tokens.ref_logp)
            case "k3":
                return k3(logp, tokens.ref_logp)
            case "k3plus":
                # A factor of value 1: it adds the gradient of the sampling distribution, which k3 alone lacks.
                return (logp - logp.detach()).exp() * k3(logp, tokens.ref_logp)
            case "k2_is":
                return importance_ratio(logp.detach(), tokens.rollout_logp) * k2(logp, tokens.ref_logp)
            case "score":
                now = logp.detach()
                return importance_ratio(now, tokens.rollout_logp) * (now - tokens.ref_logp) * logp
            case "abs":
                return (logp - tokens.ref_logp).abs()
            case _:
                # the live ratio brings the gradient of the sampling distribution, and corrects for the engine's
                # policy
                return importance_ratio(logp, tokens.rollout_logp) * k3(logp, tokens.ref_logp)


class AdaptiveEntropy(Controller):
    """Entropy bonus whose weight follows a target (Skywork-OR1, https://arxiv.org/abs/2505.22312).

    After each step the weight rises by `delta` if the policy's entropy was below the target, and falls otherwise. The
    bonus is on only in steps that follow one below the target.
    """

    target: float | None = Field(default=None, gt=0)
    """Desired mean entropy per token, in nats. Unset: the weight is entropy_coef."""
    delta: float = Field(default=1e-4, gt=0)
    """Change of the weight per step."""
    high: float = Field(default=5e-3, gt=0)
    """Largest weight; the smallest is 0."""

    def current_coef(self, alg: Stateful, coef: float) -> float:
        """Return the weight of the step. coef: entropy_coef."""
        return coef if self.target is None else float(alg.state["entropy_coef"]) * float(alg.state["entropy_on"])

    def initial_entries(self) -> dict[str, float]:
        return {} if self.target is None else {"entropy_coef": 0.0, "entropy_on": 1.0}

    def next_entries(self, state: State, step: StepSeen) -> dict[str, float]:
        if self.target is None:
            return {}
        is_low = step.mean("entropy") < self.target
        moved = float(state["entropy_coef"]) + (self.delta if is_low else -self.delta)
        return {"entropy_coef": min(self.high, max(0.0, moved)), "entropy_on": float(is_low)}


class Overlong(StrictModel):
    """Rule for completions near or at the token budget."""

    mode: Literal["none", "penalty", "filter"] = "none"
    """penalty: the reward decreases by up to `coef` over the last `buffer` tokens before `max_tokens` (DAPO's soft
    overlong punishment). filter: a completion cut off by the budget is not trained on; its reward still counts in the
    group."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Number of sampled tokens with the full penalty, for mode penalty. Unset: rollout.max_new_tokens."""
    buffer: int | None = Field(default=None, ge=1)
    """Number of tokens before max_tokens over which the penalty grows, for mode penalty."""
    coef: float = Field(default=1.0, gt=0)
    """Maximum penalty, for mode penalty."""

    @model_validator(mode="after")
    def penalty_knows_its_ramp(self) -> Overlong:
        if self.mode == "penalty" and self.buffer is None:
            raise ValueError("mode: penalty needs buffer, in tokens")
        if self.max_tokens is not None and self.buffer is not None and self.buffer > self.max_tokens:
            raise ValueError(f"buffer={self.buffer} must not be larger than max_tokens={self.max_tokens}")
        return self

    def compute_penalty(self, sample: Sample) -> float:
        """Return the penalty to add to the sample's reward, in [-coef, 0]."""
        if self.mode != "penalty":
            return 0.0
        assert self.max_tokens is not None and self.buffer is not None
        return self.coef * overlong_penalty(sample.n_sampled, max_tokens=self.max_tokens, buffer=self.buffer)

    def exclude_truncated(self, groups: list[Group]) -> list[Group]:
        """Return the groups with every truncated sample excluded, for mode filter."""
        if self.mode != "filter":
            return groups
        return [
            [s.replace(excluded=np.ones_like(s.action_mask)) if s.stop == "length" else s for s in group]
            for group in groups
        ]


def overlong_penalty(tokens: int, *, max_tokens: int, buffer: int) -> float:
    """Return 0 up to max_tokens - buffer tokens, then decreasing to -1 (https://arxiv.org/abs/2503.14476, Eq. 13)."""
    return max(-1.0, min(0.0, (max_tokens - buffer - tokens) / buffer))
