"""Observer of `rollout.batch_invariant`: tokens were drawn from the trainer's log-probabilities, to the bit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from configs.schema import RLConfig
from core.cluster.workers import Workers
from core.errors import RunStopped
from core.types.arrays import Floats, Mask
from core.types.samples import Sample
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.packing.batches import Plan
from data_feeds.packing.columns import lay_out_columns
from driver.load_recipe import Loaded
from driver.rl.observers import PlannedStep, RunObserver, StartedRun
from trainers.invariant import FirstPass


def plan_observer(loaded: Loaded[RLConfig]) -> InvariancePlan:
    """Return the observer of a recipe; driver/checks/invariance.py has checked it."""
    return InvariancePlan()


class InvariancePlan:
    """Observer of the claim, before the start."""

    on_trainer = FirstPass

    def start(self, run: StartedRun) -> InvarianceCheck:
        return InvarianceCheck(run.trainers.attribute("observers.batch_invariant"), run.tokenizer)


class InvarianceCheck(RunObserver):
    """Comparison of every token's log-probability at its draw with those of the trainer that has the same weights.

    With one update per step these are of its training pass. With several they are of the pass for prox_logp, which
    scores all tokens before the first update.
    """

    def __init__(self, passes: Workers[FirstPass], tokenizer: ChatTokenizer):
        self.passes, self.tokenizer = passes, tokenizer

    def on_plan(self, step: PlannedStep) -> None:
        for plan in step.plans:
            self._compare(plan, {id(s): s.columns["prox_logp"] for s in plan.samples if "prox_logp" in s.columns})

    async def on_step(
        self, step: PlannedStep, measured: Mapping[str, float], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        [passes] = await self.passes.call_all(FirstPass.take)
        laid = lay_out_columns(step.plans[0], [[{"logp": logp} for logp in passes]], fill=0.0)
        self._compare(step.plans[0], {sample: columns["logp"] for sample, columns in laid.items()})
        return {}

    def _compare(self, plan: Plan, scored: Mapping[int, Floats]) -> None:
        """Raise RunStopped at the first token that differs. scored: the trainer's [L], by id() of the sample."""
        for number, (sample, mask) in enumerate(zip(plan.samples, plan.list_masks(), strict=True)):
            if sample.origin != "policy" or id(sample) not in scored:
                continue  # another policy sampled it
            own = scored[id(sample)]
            if (at := find_difference(sample, own, mask)) is not None:
                text = self.tokenizer.decode([int(sample.token_ids[at])])
                raise RunStopped(
                    f"rollout.batch_invariant: token {at} ({text!r}) of sample {number} of the step, a reply to "
                    f"{sample.prompt.id}, was drawn with log-probability {sample.rollout_logp[at]:.9g}, and the "
                    f"trainer computes {own[at]:.9g}: engine and trainer do not add in the same order; set it to false"
                )


def find_difference(sample: Sample, logp: Floats, mask: Mask) -> int | None:
    """Return the first token of `mask` [L] whose log-probability differs in a bit from the engine's; None if none does.

    A token that the policy did not choose has none, and is not compared.
    """
    # as integers, so that NaN equals itself
    bits = [x.view(np.dtype(f"i{x.itemsize}")) for x in (sample.rollout_logp, logp)]
    differs = np.flatnonzero((bits[0] != bits[1]) & mask & sample.action_mask)
    return int(differs[0]) if len(differs) else None
