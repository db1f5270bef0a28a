"""Reinforcement learning: python main_rl.py --config configs/quickstart.yaml [key=value ...]

A step: take groups of samples, score the columns the algorithm asks for, assign credit, train,
publish the new weights, log. `train` below is that step; everything it calls is one file away.
Beside it the engines generate as far ahead as `max_lag` lets them: with 0 they wait for every publish.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from core.cli import guarded, parse

if TYPE_CHECKING:
    from driver.rl_run import Run
    from driver.session import Session


async def train(run: Run) -> None:
    """The loop. Prompts become groups of Samples, those become Batches, and the weights move."""
    await run.publish(version=run.first_step)
    await run.evaluate("before")
    async with run.generation.beside():
        for step in range(run.first_step, run.steps):
            groups, drawn = await run.take(step)
            groups = await run.score(groups)
            groups = run.credit(groups)
            learnt = await run.learn(groups)
            synced = await run.publish_if_due(step + 1, learnt)
            measured = await run.evaluate_if_due(step + 1)
            await run.log(step, groups, drawn | learnt | synced | measured)
            await run.checkpoint_if_due(step, drawn | learnt | synced)
    await run.evaluate("after")
    await run.save()


def main() -> int:
    args = parse("main_rl.py", "Train a policy by reinforcement learning.")
    from configs.schema import RLConfig
    from driver.explain import explain
    from driver.load_recipe import load_recipe
    from driver.rl_setup import prepare, start
    from driver.session import run_session

    loaded = load_recipe(RLConfig, args.config, args.overrides)
    if args.explain:
        print(explain(loaded))
        return 0
    prepared = prepare(loaded)

    async def body(session: Session) -> None:
        await train(await start(prepared, session))

    return run_session(loaded.cfg, body)


if __name__ == "__main__":
    sys.exit(guarded(main))
