"""Reinforcement learning: python main_rl.py --config configs/quickstart.yaml [key=value ...]

A step: wait for groups of samples, compute the columns that the algorithm requires, compute advantages, train, sync
weights, log. `train` below is that step; everything it calls is one file away. Beside it the engines generate, as far
ahead as `max_staleness` allows; with 0 they wait for every weight sync.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from core.cli import parse_arguments, run_guarded

if TYPE_CHECKING:
    from driver.rl_run import Run
    from driver.session import Session


async def train(run: Run) -> None:
    """Run the training loop: prompts become groups of Samples, those become Batches, and the weights are updated."""
    await run.sync_weights(version=run.first_step)
    await run.evaluate("before")
    async with run.generation.running_in_background():
        for step in range(run.first_step, run.steps):
            groups, rollout_metrics = await run.next_groups(step)
            groups = await run.add_columns(groups)
            groups = run.compute_advantages(groups)
            train_metrics = await run.train(groups)
            sync_metrics = await run.sync_weights_if_due(step + 1, train_metrics)
            eval_metrics = await run.evaluate_if_due(step + 1)
            await run.log(step, groups, rollout_metrics | train_metrics | sync_metrics | eval_metrics)
            await run.checkpoint_if_due(step, rollout_metrics | train_metrics | sync_metrics)
    await run.evaluate("after")
    await run.save()


def main() -> int:
    args = parse_arguments("main_rl.py", "Train a policy by reinforcement learning.")
    from configs.schema import RLConfig
    from driver.explain import explain
    from driver.load_recipe import Loaded, load_recipe
    from driver.on_failure import run_with_resumes
    from driver.rl_setup import prepare, start
    from driver.session import run_session

    loaded = load_recipe(RLConfig, args.config, args.overrides)
    if args.explain:
        print(explain(loaded))
        return 0

    def attempt(loaded: Loaded[RLConfig]) -> int:
        prepared = prepare(loaded)

        async def body(session: Session) -> None:
            await train(await start(prepared, session))

        return run_session(prepared.loaded.cfg, body)

    return run_with_resumes(attempt, loaded)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
