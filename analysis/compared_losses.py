"""The key `compare_losses`: losses that are measured on the batches of the one that trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from algs.base import PolicyGradient
from analysis.capture.batch_file import in_order
from analysis.capture.losses import NamedLoss, credit_groups, describe_lack, parse_losses
from configs.schema import RLConfig
from core import metrics as names
from core.errors import RunStopped, UserError
from core.types.samples import Batch, Group
from data_feeds.packing.batches import Plan, token_weights


def load_compared_losses(cfg: RLConfig, alg: PolicyGradient) -> list[NamedLoss]:
    """Return the compared losses of a recipe. Raises UserError for one that needs what the run does not compute."""
    compared = parse_losses(cfg.compare_losses, key="compare_losses", max_new_tokens=cfg.rollout.max_new_tokens)
    columns = alg.required_columns | ({"prox_logp"} if cfg.updates_per_step > 1 else set())
    for loss in compared:
        lack = describe_lack(
            loss,
            columns=columns,
            models=alg.frozen_models,
            entropy=alg.needs_entropy,
            group_size=cfg.group_size,
        )
        if not lack and loss.alg.whole_groups and not alg.whole_groups:
            lack = "compares whole groups, which the run's algorithm splits over micro-batches"
        if lack:
            raise UserError(f"compare_losses: {loss.name} {lack}: train with it, or leave it out here")
    return compared


@dataclass
class ComparedLosses:
    """The compared losses of a run, on the driver's side."""

    losses: list[NamedLoss]
    max_new_tokens: int
    stale: bool
    """True with several updates per step."""
    say: Callable[[str], None]
    warned: set[str] = field(default_factory=set)

    def attach(self, updates: list[list[list[Batch]]], plans: list[Plan], groups: list[list[Group]]) -> None:
        """Give every batch of the updates, [update][rank][micro-batch], its tokens as each compare_losses sees them.

        groups: those of each update. Advantages are computed over all groups of the step, as the main ones are.
        """
        step = in_order(groups)
        for loss in self.losses:
            credited = credit_groups(loss, step, stale=self.stale)
            by_sample = {id(s): own for g, h in zip(step, credited, strict=True) for s, own in zip(g, h, strict=True)}
            for batches, plan, of_update in zip(updates, plans, groups, strict=True):
                own = [[by_sample[id(s)] for s in g] for g in of_update]
                for rank, shadowed in zip(batches, self._plan_like(loss, plan, of_update, own).batches(), strict=True):
                    for batch, other in zip(rank, shadowed, strict=True):
                        batch.compared[loss.name] = other.tokens

    def _plan_like(self, loss: NamedLoss, plan: Plan, groups: list[Group], own: list[Group]) -> Plan:
        """Return the plan of the same micro-batches with the samples and the weights of a compared loss."""
        weights = token_weights(own, loss.alg.loss_norm, horizon=self.max_new_tokens)
        pairs = [(s, other) for g, h in zip(groups, own, strict=True) for s, other in zip(g, h, strict=True)]
        if any(not np.array_equal(s.loss_mask, other.loss_mask) for s, other in pairs):
            raise RunStopped(
                f"compare_losses: {loss.name} trains on other tokens than the run's algorithm (overlong.mode, or "
                "its own `excluded`), so it cannot watch the same batches: leave it out, and compare with python -m "
                "analysis.capture.replay"
            )
        at = {id(s): (other, weight) for (s, other), weight in zip(pairs, weights, strict=True)}
        found = [at[id(s)] for s in plan.samples]
        return replace(plan, samples=[other for other, _ in found], weights=[weight for _, weight in found])

    def drop_non_finite(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Drop metrics of compared losses that are not finite: they must not end the run."""
        bad = [name for name, value in metrics.items() if name.startswith(names.SHADOW) and not math.isfinite(value)]
        for name in sorted({*bad} - self.warned):
            self.say(f"WARNING: {name} is {metrics[name]}; where it is not finite it is left out of the log")
        self.warned |= {*bad}
        return {name: value for name, value in metrics.items() if name not in bad}
