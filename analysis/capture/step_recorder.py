"""Recorder of a step in a trainer: numbers of every token, and checksums of the weights.

The numbers come from the training pass, so recording needs no extra pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from algs.base import Metrics, with_prox
from algs.ops import importance_ratio, k3
from core.errors import writing
from core.metrics import CUT, TRAIN
from core.types.arrays import Floats
from core.types.samples import Policy, Tokens
from core.types.weights import ExportScope
from trainers.observers import BatchSeen, Observer
from trainers.trainer import Trainer
from trainers.weight_sync.fingerprint import fingerprint

CLIP_METRICS = tuple(name.removeprefix(TRAIN) for name in CUT)
"""Names of loss metrics that are 1 for clipped, capped or masked tokens, and 0 for others."""


@dataclass(slots=True, kw_only=True)
class RecordedUpdate:
    """Record of an update on a rank."""

    fingerprints: dict[ExportScope, dict[str, int]]
    """Checksums of the weights before the update, by tensor; on the first rank only."""
    tokens: list[dict[str, Floats]]
    """Columns of the tokens of each micro-batch, [M] float32 each."""
    norms: dict[str, float]
    """Gradient norms; empty if the update was skipped."""


@dataclass(slots=True, kw_only=True)
class _Update:
    fingerprints: dict[ExportScope, dict[str, int]]
    tokens: list[dict[str, Tensor]] = field(default_factory=list)
    norms: dict[str, float] = field(default_factory=dict)


class StepRecorder(Observer):
    """Step recorder of a rank, active between `begin` and `end`."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.updates: list[_Update] | None = None
        """Updates of the step, or None if it is not recorded."""
        self.weights: Path | None = None

    def begin(self, weights: Path | None) -> None:
        """Record the next step: numbers of every token, and checksums of the weights before each update.

        weights: folder to write these weights into as well, in a folder for each update.
        """
        self.updates, self.weights = [], weights

    def end(self, *, keep: bool) -> list[RecordedUpdate]:
        """Stop recording. Return one record per update, or discard them."""
        assert self.updates is not None, "begin() comes first"
        # forgotten before the conversion, so that a failure does not leave the recorder active
        updates, self.updates = self.updates, None
        return [_with_arrays(update) for update in updates] if keep else []

    def begin_update(self) -> None:
        if self.updates is None:
            return
        trainer = self.trainer
        self.updates.append(_Update(fingerprints=fingerprint_weights(trainer)))
        if self.weights is not None:
            folder = self.weights / f"update_{len(self.updates) - 1}"
            with writing(folder):
                trainer.write_model(trainer.policy, folder, ["adapter" if trainer.lora else "whole"])

    @torch.no_grad()
    def on_batch(self, seen: BatchSeen) -> None:
        """Record the numbers of a micro-batch, without moving them off the device."""
        found = seen.objective
        if self.updates is not None and seen.policy is not None:
            self.updates[-1].tokens.append(describe_tokens(seen.policy, seen.batch.tokens, found.loss, found.metrics))

    def on_update(self, norms: Mapping[str, float]) -> None:
        if self.updates is not None:
            self.updates[-1].norms = dict(norms)


def _with_arrays(update: _Update) -> RecordedUpdate:
    return RecordedUpdate(
        fingerprints=update.fingerprints,
        tokens=[{name: v.float().cpu().numpy() for name, v in batch.items()} for batch in update.tokens],
        norms=update.norms,
    )


def fingerprint_weights(trainer: Trainer) -> dict[ExportScope, dict[str, int]]:
    """Return the checksum of every tensor of the policy; on other ranks than the first they are not computed."""
    found: dict[ExportScope, dict[str, int]] = {}
    for scope in ("whole", "adapter") if trainer.lora else ("whole",):
        # small buckets of 64 MiB: of every tensor only a checksum stays
        buckets = trainer.policy.export_weights(2**26, scope)  # gathering a sharded parameter needs every rank
        found[scope] = {k: v for bucket in buckets if trainer.rank == 0 for k, v in fingerprint(bucket).items()}
    return found


def describe_tokens(policy: Policy, tokens: Tokens, loss: Tensor, metrics: Metrics) -> dict[str, Tensor]:
    """Return the numbers of each token under the names of analysis/capture/tokens.py, [M] each and detached."""
    logp = policy.logp.detach()
    # with one update per step there is no column prox_logp, and the ratio is 1 by definition
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
    """Return 1 for tokens reported as clipped, capped or masked; None if the loss has no such metric."""
    named = [metrics[name].detach().float() for name in CLIP_METRICS if name in metrics]
    return torch.stack(named).amax(0) if named else None
