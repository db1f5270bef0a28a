"""What a trainer keeps of one step where it is asked to: numbers of every token, and checksums of the weights.

The numbers are those of the pass that trains, so keeping them costs no other one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from algs.base import Metrics, with_prox
from algs.ops import importance_ratio, k3
from core.metrics import CUT, TRAIN
from core.types.arrays import Floats
from core.types.samples import Policy, Tokens
from core.types.weights import ExportScope

CLIP_METRICS = tuple(name.removeprefix(TRAIN) for name in CUT)
"""Metrics of a loss, as it names them, that are 1 where it clips, caps or masks a token, and 0 elsewhere."""


@dataclass(slots=True, kw_only=True)
class RecordedUpdate:
    """Record of one update on one rank."""

    fingerprints: dict[ExportScope, dict[str, int]]
    """Checksums of the weights before the update, by tensor; on the first rank only."""
    tokens: list[dict[str, Floats]]
    """Columns of the tokens of each micro-batch, [M] float32 each."""
    norms: dict[str, float]
    """Norms of the gradients; nothing where the update was skipped."""


@dataclass(slots=True, kw_only=True)
class _Update:
    fingerprints: dict[ExportScope, dict[str, int]]
    tokens: list[dict[str, Tensor]] = field(default_factory=list)
    norms: dict[str, float] = field(default_factory=dict)


class StepRecord:
    """Record of a step that is being made."""

    def __init__(self, *, weights: Path | None):
        self.weights = weights
        """Folder for the weights before each update; None writes none."""
        self.updates: list[_Update] = []

    def begin_update(self, fingerprints: dict[ExportScope, dict[str, int]]) -> None:
        self.updates.append(_Update(fingerprints=fingerprints))

    @torch.no_grad()
    def add_batch(self, policy: Policy, tokens: Tokens, loss: Tensor, metrics: Metrics) -> None:
        """Keep the numbers of a micro-batch, on its device."""
        self.updates[-1].tokens.append(describe_tokens(policy, tokens, loss, metrics))

    def end_update(self, norms: dict[str, float]) -> None:
        self.updates[-1].norms = norms

    def finish(self) -> list[RecordedUpdate]:
        """Return the records with their numbers as arrays."""
        return [
            RecordedUpdate(
                fingerprints=update.fingerprints,
                tokens=[{name: v.float().cpu().numpy() for name, v in batch.items()} for batch in update.tokens],
                norms=update.norms,
            )
            for update in self.updates
        ]


def describe_tokens(policy: Policy, tokens: Tokens, loss: Tensor, metrics: Metrics) -> dict[str, Tensor]:
    """Return the numbers of each token under the names of analysis/capture/tokens.py, [M] each and detached."""
    logp = policy.logp.detach()
    tokens = with_prox(policy, tokens)
    found = {
        "advantage": tokens.advantage,
        "weight": tokens.weight,
        "logp": logp,
        "rollout_logp": tokens.rollout_logp,
        "logp_difference": logp - tokens.rollout_logp,
        "ratio": importance_ratio(logp, tokens.prox_logp),
        "loss": loss.detach(),
    }
    if (clipped := find_clipped(metrics)) is not None:
        found["clipped"] = clipped
    if policy.entropy is not None:
        found["entropy"] = policy.entropy.detach()
    if tokens.has("ref_logp"):
        found["kl"] = k3(logp, tokens.ref_logp)
    return found


def find_clipped(metrics: Metrics) -> Tensor | None:
    """Return 1 where the loss says that it clipped, capped or masked the token; None where it has no such metric."""
    named = [metrics[name].detach().float() for name in CLIP_METRICS if name in metrics]
    return torch.stack(named).amax(0) if named else None
