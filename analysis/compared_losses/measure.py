"""Metrics of compared losses, on the batches and the forward pass of the loss that trains, without any gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from algs.base import Algorithm
from algs.totals import Ranks, sum_totals
from algs.validate import check_per_token
from core.metrics import COMPARE_LOSSES
from core.types.samples import Policy, Tokens
from trainers.meter import Meter
from trainers.observers import BatchSeen, Observer


class ComparedLossMeter(Observer):
    """Metrics of compared losses over the updates of a step that were made."""

    def __init__(self, rank: Ranks, *, losses: Mapping[str, Algorithm]):
        self.rank, self.losses = rank, losses

    def begin_step(self) -> None:
        self.totals = {name: Meter() for name in self.losses}

    def begin_update(self) -> None:
        self.seen: list[tuple[Policy, dict[str, Tokens]]] = []
        """Policy of each micro-batch of the update, and the tokens as each compared loss sees them."""

    def on_batch(self, seen: BatchSeen) -> None:
        assert seen.policy is not None, "a reward model has no losses to compare"
        self.seen.append((seen.policy, seen.batch.compared))

    @torch.no_grad()
    def on_update(self, norms: Mapping[str, float]) -> None:
        """Measure every compared loss on the batches seen. Totals require all batches of the update."""
        seen, self.seen = self.seen, []
        if not norms:  # skipped: as for the loss that trains, it does not count
            return
        for name, alg in self.losses.items():
            # totals, such as P3O's effective sample size, need every batch of the update before the first loss
            own = [(as_needed_by(alg, policy), tokens[name]) for policy, tokens in seen]
            totals = sum_totals(alg, own, self.rank)
            for (policy, plain), reduced in zip(own, totals, strict=False):  # without end if there are none
                tokens = reduced.add_to(plain)
                loss, metrics = check_per_token(alg, alg.objective(policy, tokens), tokens)
                self.totals[name].add(tokens.weight, {"loss": loss, **metrics})

    def finish(self) -> dict[str, float]:
        """Return the means over all ranks, under COMPARE_LOSSES, `<name>/<metric>`."""
        return {
            f"{COMPARE_LOSSES}{name}/{metric}": value
            for name, meter in self.totals.items()
            for metric, value in meter.compute_means(self.rank.sum_over_rows).items()
            if metric != "tokens"  # they are those of the loss that trains
        }


def as_needed_by(alg: Algorithm, policy: Policy) -> Policy:
    """Return the policy as a trainer with this algorithm computes it: with entropy only if needed."""
    return policy if alg.needs_entropy else Policy(logp=policy.logp)
