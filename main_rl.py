"""Reinforcement learning: python main_rl.py --config configs/quickstart.yaml [key=value ...]

A step: wait for groups of samples, compute the columns that the algorithm requires, compute advantages, train, sync
weights, log. `train` below is that step; everything it calls is one file away. Beside it the engines generate, as far
ahead as `max_staleness` allows; with 0 they wait for every weight sync.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from core.cli import parse_arguments, run_guarded

if TYPE_CHECKING:
    from configs.schema import RLConfig
    from driver.load_recipe import Loaded
    from driver.records.run_result import RunResult
    from driver.rl.run import Run


async def train(run: Run) -> None:
    """Run the training loop: prompts become groups of Samples, those become Batches, and the weights are updated."""
    await run.sync_weights(version=run.first_step)
    await run.evaluate("before")
    async with run.generation.running_in_background():
        for step in run.remaining_steps():
            groups, rollout_metrics = await run.next_groups(step)
            if run.colocation is not None:  # placement: colocate; with the weights the engines get the devices back
                await run.colocation.give_to_trainers()
            groups = await run.compute_columns(groups)
            groups = run.compute_advantages(groups)
            train_metrics = await run.train(groups)
            sync_metrics = await run.sync_weights_if_due(step + 1, train_metrics)
            eval_metrics = await run.evaluate_if_due(step + 1)
            await run.log(step, groups, rollout_metrics | train_metrics | sync_metrics | eval_metrics)
            await run.checkpoint_if_due(step, rollout_metrics | train_metrics | sync_metrics)
    await run.evaluate("after")
    await run.save()


def main() -> int:
    args = parse_arguments("Train a policy by reinforcement learning.")
    from configs.schema import RLConfig
    from driver.program import run_program

    return run_program(__file__, RLConfig, args, launch)


def run(config: str | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunResult:
    """Run from Python, in a notebook too, and return the result of the run.

    config: the path of a recipe, or its keys and values. overrides: such as trainer.lr=1e-5. Mistakes in them raise
    core.errors.UserError, and a run that must stop raises core.errors.RunStopped.
    """
    from configs.schema import RLConfig
    from driver.from_python import call_from_python
    from driver.load_recipe import load_recipe

    return call_from_python(lambda: launch(load_recipe(RLConfig, config, overrides)))


def launch(loaded: Loaded[RLConfig]) -> RunResult:
    """Prepare and run; if a process dies and the recipe allows it, resume."""
    from driver.program import launch_run
    from driver.rl.setup import prepare, start

    return launch_run(loaded, prepare, start, train)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
