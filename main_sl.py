"""Supervised learning: python main_sl.py --config configs/quickstart_sft.yaml [key=value ...]

The same trainers, batches and configuration as reinforcement learning; the data is given.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from core.cli import parse_arguments, run_guarded

if TYPE_CHECKING:
    from driver.session import Session
    from driver.sl_run import Run


async def train(run: Run) -> None:
    """Run the training loop: rows become Batches, and the weights are updated."""
    await run.evaluate("before")
    run.session.clock.start_lap()
    for step in range(run.first_step, run.steps):
        train_metrics = await run.train(run.draw_rows(step))
        eval_metrics = await run.evaluate_if_due(step)
        run.log(step, train_metrics | eval_metrics)
        await run.checkpoint_if_due(step, train_metrics | eval_metrics)
    await run.evaluate("after")
    await run.save()


def main() -> int:
    args = parse_arguments("main_sl.py", "Train a model on given text.")
    from configs.schema import SLConfig
    from driver.explain import explain
    from driver.load_recipe import Loaded, load_recipe
    from driver.on_failure import run_with_resumes
    from driver.session import run_session
    from driver.sl_run import prepare, start

    loaded = load_recipe(SLConfig, args.config, args.overrides)
    if args.explain:
        print(explain(loaded))
        return 0

    def attempt(loaded: Loaded[SLConfig]) -> int:
        prepared = prepare(loaded)

        async def body(session: Session) -> None:
            await train(await start(prepared, session))

        return run_session(prepared.loaded.cfg, body)

    return run_with_resumes(attempt, loaded)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
