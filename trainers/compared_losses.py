"""Shadow losses: measured on the batches and the forward pass of the loss that trains, without any gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from algs.base import Algorithm, sum_totals
from algs.validate import check_per_token
from core.metrics import SHADOW
from core.types.samples import Policy, Tokens
from trainers.meter import Meter


class ComparedLossMeter:
    """Metrics of compared losses over the updates of a step."""

    def __init__(self, compared: Mapping[str, Algorithm]):
        self.compared = compared
        self.totals = {name: Meter() for name in compared}
        self.seen: list[tuple[Policy, dict[str, Tokens]]] = []
        """Policy of each micro-batch of the update, and its tokens as each compare_losses sees them."""

    def see(self, policy: Policy, tokens: dict[str, Tokens]) -> None:
        """Keep the policy of a micro-batch, without its graph, until the update is complete."""
        if self.compared:
            entropy = None if policy.entropy is None else policy.entropy.detach()
            self.seen.append((Policy(logp=policy.logp.detach(), entropy=entropy), tokens))

    @torch.no_grad()
    def end_update(self, add_up: Callable[[Tensor], Tensor], *, was_made: bool) -> None:
        """Measure every compared loss on the batches seen. A skipped update does not count.

        add_up: sums a tensor over the ranks, for the losses that need sums over the whole update.
        """
        seen, self.seen = self.seen, []
        if not was_made:  # the same on every rank
            return
        for name, alg in self.compared.items():
            own = [(as_needed_by(alg, policy), tokens[name]) for policy, tokens in seen]
            totals = sum_totals(alg, own, add_up)
            for policy, plain in own:
                tokens = plain.replace(totals=totals)
                loss, metrics = check_per_token(alg, alg.objective(policy, tokens), tokens)
                self.totals[name].add(tokens, {"loss": loss, **metrics})

    def compute_means(self, add_up: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return the means over all ranks, under SHADOW, `<name>/<metric>`."""
        return {
            f"{SHADOW}{name}/{metric}": value
            for name, meter in self.totals.items()
            for metric, value in meter.compute_means(add_up).items()
            if metric != "tokens"  # they are those of the loss that trains
        }


def as_needed_by(alg: Algorithm, policy: Policy) -> Policy:
    """Return the policy as a trainer with this algorithm would compute it: with the entropy only where it is needed."""
    return policy if alg.needs_entropy else Policy(logp=policy.logp)
