"""Evaluation schedule of an RL run, and the log lines of the evaluations."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from configs.schema import RLConfig
from core import metrics as names
from core.errors import RunStopped
from core.timing.phases import Phase
from core.types.samples import Prompt
from data_feeds.feed import Feed
from driver.context import RunContext
from driver.evaluation.evaluator import EvalResult, Evaluator
from driver.records.run_result import name_start
from driver.rl.colocation import Colocation
from rollouts.scheduling.generation import Generation

T = TypeVar("T")


class EvaluatedRun(Protocol):
    """Part of a run that an evaluation calls."""

    steps_done: int
    colocation: Colocation | None

    async def sync_weights(self, version: int) -> dict[str, float]: ...

    async def while_trainers_wait(self, work: Coroutine[Any, Any, T]) -> T: ...


@dataclass
class RunEvaluation:
    """Evaluations of a run on its held-out prompts."""

    evaluator: Evaluator
    context: RunContext
    every: int
    """Steps between two evaluations; 0 makes none while the run trains."""
    last: EvalResult | None = None
    """The last evaluation."""

    async def evaluate_if_due(self, run: EvaluatedRun, steps_done: int) -> dict[str, float]:
        """Evaluate after every `every` steps; return the metrics of an evaluation in place."""
        if self.context.checkpoint_is_due(steps_done):
            await self.end_pending()  # a resumed run could not make it again
        if not self.every or steps_done % self.every:
            return {}
        if not self.evaluator.may_run_beside(steps_done):
            proof = await self._sync_if_older(run)
            return proof | await self._evaluate(run, f"after step {steps_done}")
        self.evaluator.begin(f"after step {steps_done}")
        return {}

    async def evaluate(self, run: EvaluatedRun, when: str) -> None:
        """Measure before or after training, and log it."""
        await self._sync_if_older(run)
        self._log(await self._evaluate(run, name_start(when, run.steps_done)))

    async def _evaluate(self, run: EvaluatedRun, when: str) -> dict[str, float]:
        """Measure the reward on the held-out prompts, `eval_samples` each at the run's temperature.

        After the last step it may have been measured already.
        """
        if self.last is None or self.last.version != self.evaluator.generation.buffer.version:
            self.last = await self._measure(run, when)
        return self._report(replace(self.last, when=when))

    async def _sync_if_older(self, run: EvaluatedRun) -> dict[str, float]:
        """Sync the weights if an evaluation must be of the newest, and return the metrics of the sync."""
        # stop_when may end a run between two weight syncs; and a result that decides is of the weights to be saved
        must = self.context.is_over or self.evaluator.decides
        is_older = self.evaluator.generation.buffer.version < run.steps_done
        return await run.sync_weights(run.steps_done) if must and is_older else {}

    async def _measure(self, run: EvaluatedRun, when: str) -> EvalResult:
        """Evaluate while the trainers wait; repeat after a sync if an engine was restarted with newer weights."""
        # After the sync all engines have the same version; if they still differ, the engine's code is wrong.
        for _ in range(2):
            with self.context.clock.phase(Phase.EVALUATE):
                found = self.evaluator.measure(await run.while_trainers_wait(self.evaluator.sample()), when)
            if found is not None:
                return found
            # Colocated engines are never restarted, so a sync would change nothing.
            if run.colocation is None:
                await run.sync_weights(run.steps_done)
        raise RunStopped(
            "the engines (rollout.engine) said after a weight sync that they sampled tokens of several versions: "
            "correct the versions that generate() returns"
        )

    async def end_pending(self) -> None:
        """Wait for a pending evaluation beside training, and log it."""
        if self.evaluator.pending is None:
            return
        with self.context.clock.phase(Phase.EVALUATE):
            found = await self.evaluator.end()
        if found is None:
            self.context.console.say(
                f"the evaluation {self.evaluator.when} is left out: an engine was restarted, and its weights are newer"
            )
        else:
            self.last = found
            self._log(self._report(found))

    def _log(self, metrics: dict[str, float]) -> None:
        self.context.log_evaluation(int(metrics[names.EVAL.format(names.VERSION)]), metrics)

    def _report(self, found: EvalResult) -> dict[str, float]:
        """Print the result of an evaluation; return the metrics under their log names."""
        shown = self.context.facts[found.when] = found.metrics
        n, mean = len(self.evaluator.prompts), shown.get(names.REWARD_MEAN)
        # reward.max_failed_fraction=1 lets every sample fail
        said = "no sample has a reward" if mean is None else f"held-out reward {mean:.3f}"
        self.context.console.say(f"{found.when}: {said} over {n} prompts")
        return {names.EVAL.format(name): value for name, value in shown.items()}


def make_evaluation(
    cfg: RLConfig, context: RunContext, generation: Generation, *, held_out: Feed[Prompt] | None
) -> RunEvaluation | None:
    """Return the evaluations of a run; None without held-out prompts."""
    if held_out is None:
        return None
    return RunEvaluation(Evaluator(cfg, held_out.all(), generation), context, cfg.eval_every)
