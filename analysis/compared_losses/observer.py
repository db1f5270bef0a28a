"""Observer of the key `compare_losses`: it passes the batches to other losses, and logs the metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from algs.base import Algorithm, PolicyGradient
from algs.totals import prepare_update
from analysis.capture.batch_file import in_order
from analysis.capture.losses import NamedLoss, credit_groups, parse_losses
from analysis.compared_losses.measure import ComparedLossMeter
from configs.schema import RLConfig
from core import metrics as names
from core.errors import RunStopped, UserError
from core.types.samples import Group
from data_feeds.packing.batches import Plan, token_weights
from driver.load_recipe import Loaded
from driver.records.rollout_metrics import name_train_metrics
from driver.rl.observers import PlannedStep, RunObserver, StartedRun
from trainers.observers import ObserverFactory


def plan_observer(loaded: Loaded[RLConfig]) -> ComparedLossesPlan:
    """Check the compared losses of a recipe. Raises UserError if a loss needs inputs that the run does not compute."""
    cfg = loaded.cfg
    losses = parse_losses(cfg.compare_losses, key="compare_losses", max_new_tokens=cfg.rollout.max_new_tokens)
    for loss in losses:
        if lack := describe_lack(loss.alg, cfg, loaded.alg):
            raise UserError(f"compare_losses: {loss.name} {lack}: train with it, or leave it out here")
    return ComparedLossesPlan(losses)


def describe_lack(alg: PolicyGradient, cfg: RLConfig, own: Algorithm) -> str:
    """Return the missing inputs of a compared loss, as the end of a sentence; "" if nothing is missing.

    own: the run's algorithm, for which the trainer computes columns, frozen models and entropy.
    """
    if alg.terms or own.terms:
        return "has terms, or the run's algorithm has, and tokens of several terms cannot be compared"
    # with several updates per step the trainer scores the proximal policy for every algorithm
    columns = own.required_columns | ({"prox_logp"} if cfg.updates_per_step > 1 else set())
    if lacking := sorted(alg.required_columns - columns):
        return f"needs the column {lacking[0]}, which the run's algorithm does not compute"
    if other := next(((name, t) for name, t in alg.teachers.items() if own.teachers.get(name) != t), None):
        return f"needs {other[0]} of the teacher {other[1].model}, which the run does not have as this loss declares it"
    if alg.needs_entropy and not own.needs_entropy:
        return "needs the entropy, which the run's algorithm does not compute (alg.entropy_coef is 0)"
    if alg.state or alg.schedules:
        return "changes from step to step (its state, or schedules), and only the run's algorithm does"
    if alg.measures:
        return f"reads policy.{min(alg.measures)}, which is computed for the run's algorithm only"
    if alg.needs_siblings and cfg.group_size < 2:
        return "compares the samples of a group, and group_size is 1"
    if alg.whole_groups and not own.whole_groups:
        return "compares whole groups, which the run's algorithm splits over micro-batches"
    if alg.whole_episodes and not own.whole_episodes and cfg.rollout.agent is not None:
        return "compares episodes as wholes, and an agent's may be split over micro-batches by the run's algorithm"
    return ""


@dataclass(frozen=True)
class ComparedLossesPlan:
    """The compared losses of a recipe, checked."""

    losses: list[NamedLoss]

    @property
    def on_trainer(self) -> ObserverFactory:
        return partial(ComparedLossMeter, losses={loss.name: loss.alg for loss in self.losses})

    def start(self, run: StartedRun) -> ComparedLosses:
        cfg = run.loaded.cfg
        # from the second update on, the policy is no longer the one that the step began with
        stale, say = cfg.updates_per_step > 1, run.context.console.say
        return ComparedLosses(self.losses, cfg.rollout.max_new_tokens, stale=stale, say=say)


@dataclass
class ComparedLosses(RunObserver):
    """The compared losses of a run, on the driver's side."""

    losses: list[NamedLoss]
    max_new_tokens: int
    stale: bool
    """True with several updates per step."""
    say: Callable[[str], None]
    warned: set[str] = field(default_factory=set[str])

    def on_plan(self, step: PlannedStep) -> None:
        """Fill `Batch.compared` with the tokens as each compared loss sees them.

        Advantages are computed over all groups of the step, as for the main loss.
        """
        groups = in_order(step.groups)
        for loss in self.losses:
            credited = credit_groups(loss, groups, stale=self.stale)
            # by identity: the plan holds these very objects, and samples of arrays cannot be compared or hashed
            by_sample = {id(s): own for g, h in zip(groups, credited, strict=True) for s, own in zip(g, h, strict=True)}
            made = step.groups[: len(step.plans)]
            for batches, plan, of_update in zip(step.batches, step.plans, made, strict=True):
                own = prepare_update(loss.alg, [[by_sample[id(s)] for s in g] for g in of_update])
                compared = self._plan_like(loss, plan, of_update, own).batches()
                for rank, of_rank in zip(batches, compared, strict=True):
                    for batch, other in zip(rank, of_rank, strict=True):
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
        # the main loss's bins are kept: the forward pass is shared, and each loss brings its own weights
        at = {id(s): (other, weight) for (s, other), weight in zip(pairs, weights, strict=True)}
        found = [at[id(s)] for s in plan.samples]
        return replace(plan, samples=[other for other, _ in found], weights=[weight for _, weight in found])

    async def on_step(
        self, step: PlannedStep, measured: Mapping[str, float], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the finite metrics of the compared losses. The others are reported once and dropped."""
        named = {name: value for loss in self.losses for name, value in name_metrics(loss.name, measured).items()}
        bad = {name for name, value in named.items() if not math.isfinite(value)}
        for name in sorted(bad - self.warned):
            self.say(f"WARNING: {name} is {named[name]}; where it is not finite it is left out of the log")
        self.warned |= bad
        return {name: value for name, value in named.items() if name not in bad}


def name_metrics(loss: str, measured: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a compared loss.

    >>> name_metrics("gspo", {"compare_losses/gspo/loss": 1.0, "compare_losses/cispo/loss": 2.0, "loss": 3.0})
    {'compare_losses/gspo/loss': 1.0}
    """
    prefix = f"{names.COMPARE_LOSSES}{loss}/"
    own = {name.removeprefix(prefix): value for name, value in measured.items() if name.startswith(prefix)}
    return {prefix + name.removeprefix(names.TRAIN): value for name, value in name_train_metrics(own).items()}
