"""Loss, metrics and gradient of a loss on the samples of a captured update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from algs.base import Algorithm, Metrics
from algs.ops import k2
from algs.validate import check_per_token
from analysis.capture.step_recorder import find_clipped
from core.errors import UserError
from core.types.arrays import Floats
from core.types.samples import Batch, Group, Policy, Tokens
from data_feeds.packing.batches import Plan
from data_feeds.packing.columns import lay_out_columns
from trainers.learner import Learner
from trainers.local import LocalTrainer, TorchLearner
from trainers.meter import Meter

Gradient = dict[str, Tensor]
"""Gradient of each parameter in training, float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """Value, metrics and gradient of a loss on an update."""

    loss: float
    """Averaged as train/loss is."""
    metrics: dict[str, float]
    gradient: Gradient
    grad_norm: float
    slopes: Floats
    """Derivative of the update's loss by the log-probability of every token of the groups, end to end; 0 where it is
    not trained on."""
    trained: NDArray[np.bool_]
    """Whether each of these tokens is trained on."""
    clipped: Floats | None
    """1 for tokens that the loss reports as clipped, capped or masked, else 0; None without such a metric."""

    @property
    def clipped_share(self) -> float | None:
        """Share of the trained tokens that are clipped; None if the loss does not report it."""
        return None if self.clipped is None else float(self.clipped[self.trained].astype(np.float64).mean())


class Distance(Algorithm):
    """k2 estimate of KL(pi || anchor) on the sampled tokens, whose gradient is that of the KL while they are fresh."""

    anchor: Literal["ref_logp", "rollout_logp"] = "rollout_logp"

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return k2(policy.logp, getattr(tokens, self.anchor)), {}


def compute_update(trainer: LocalTrainer, alg: Algorithm, plan: Plan, groups: list[Group]) -> Computed:
    """Compute forward and backward passes of an update, as Trainer.step does, and change no weight.

    groups: those that `plan` splits, as `alg` credited them.
    """
    # with_totals sums what trainer.alg asks for over the update
    trainer.set_algorithm(alg)
    meter = Meter()
    columns: list[list[dict[str, Floats]]] = []
    for batches in plan.batches():
        columns.append([])
        for batch in trainer.with_totals(batches):
            slope, marks = _add_gradient(trainer, alg, batch, meter)
            found = {"slope": slope} if marks is None else {"slope": slope, "clipped": marks}
            columns[-1].append({name: values.cpu().numpy() for name, values in found.items()})
    learner = trainer.policy
    assert isinstance(learner, TorchLearner)
    gradient = take_gradient(learner)
    # this process has computed the batches of every rank, so there are no other ranks to sum over
    metrics = meter.compute_means(lambda values: values)
    laid = lay_out_columns(plan, columns, fill=0.0)
    samples = [s for g in groups for s in g]

    def join(name: str) -> Floats:
        zeros = [np.zeros(len(s.token_ids), np.float32) for s in samples]  # of samples without a trained token
        return np.concatenate([laid.get(id(s), {}).get(name, zero) for s, zero in zip(samples, zeros, strict=True)])

    return Computed(
        loss=metrics["loss"],
        metrics=metrics,
        gradient=gradient,
        # before clipping, as the recorded norm is
        grad_norm=float(nn.utils.get_total_norm(list(gradient.values()))),
        slopes=join("slope"),
        trained=np.concatenate([s.loss_mask for s in samples]),
        clipped=join("clipped") if any("clipped" in batch for rank in columns for batch in rank) else None,
    )


def _add_gradient(trainer: LocalTrainer, alg: Algorithm, batch: Batch, meter: Meter) -> tuple[Tensor, Tensor | None]:
    """Add the gradient of a micro-batch; return slope and clip mark of each token, [M] each."""
    policy = trainer.forward(batch)
    # detached leaves, because the slopes are read at the log-probabilities and not only at the weights
    cut = policy.apply(_leaf)
    loss, metrics = check_per_token(alg, alg.objective(cut, batch.tokens), batch.tokens)
    if not loss.requires_grad:
        raise UserError(f"{type(alg).__name__}: the loss has no gradient: compute it from policy.logp")
    # ends at the leaves: it fills in the slopes, and reaches no weight of the model
    (loss * batch.tokens.weight).sum().backward()
    meter.add(batch.tokens.weight, {"loss": loss, **metrics})
    # a loss may depend on the entropy alone, and then no gradient arrives at the log-probabilities
    slope = torch.zeros_like(cut.logp) if cut.logp.grad is None else cut.logp.grad
    # the trainer's own backward pass takes a scalar: this one has the gradient of the loss, which may also depend on
    # the entropy and other measures
    pairs = zip(policy.list_tensors(), cut.list_tensors(), strict=True)
    total = (policy.logp * slope).sum()
    for whole, leaf in list(pairs)[1:]:
        if leaf.grad is not None:
            total = total + (whole * leaf.grad).sum()
    learner: Learner = trainer.policy
    learner.backward(total)
    return slope, find_clipped(metrics)


def _leaf(values: Tensor) -> Tensor:
    return values.detach().requires_grad_()


def take_gradient(learner: TorchLearner) -> Gradient:
    """Return the accumulated gradient, and reset it."""
    names = [name for name, p in learner.model.named_parameters() if p.requires_grad]
    gradient = {
        # gradients of two losses are compared by name, so every parameter needs an entry
        name: torch.zeros_like(m) if m.grad is None else m.grad
        for name, m in zip(names, learner.master, strict=True)
    }
    for m in learner.master:
        m.grad = None
    return gradient


def inner(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Compute the inner product of two gradients, in float64.

    >>> inner([torch.ones(2)], [torch.full((2,), 3.0)])
    6.0
    """
    # float64: a float32 sum over all parameters would drop the many small products
    return float(sum(torch.dot(a.flatten().double(), b.flatten().double()) for a, b in zip(one, other, strict=True)))
