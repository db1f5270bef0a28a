"""Supervised learning: python main_sl.py --config configs/quickstart_sft.yaml [key=value ...]

The same trainers, batches and configuration as reinforcement learning; the data is given.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from core.cli import parse_arguments, run_guarded

if TYPE_CHECKING:
    from configs.schema import SLConfig
    from driver.load_recipe import Loaded
    from driver.records.run_result import RunResult
    from driver.sl.run import Run


async def train(run: Run) -> None:
    """Run the training loop: rows become Batches, and the weights are updated."""
    await run.evaluate("before")
    run.context.clock.start_lap()
    for step in run.remaining_steps():
        train_metrics = await run.train(run.draw_rows(step))
        eval_metrics = await run.evaluate_if_due(step)
        run.log(step, train_metrics | eval_metrics)
        await run.checkpoint_if_due(step, train_metrics | eval_metrics)
    await run.evaluate("after")
    await run.save()


def main() -> int:
    args = parse_arguments("Train a model on given text.")
    from configs.schema import SLConfig
    from driver.program import run_program

    return run_program(__file__, SLConfig, args, launch)


def run(config: str | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunResult:
    """Run from Python, in a notebook too, and return the result of the run.

    config: the path of a recipe, or its keys and values. overrides: such as trainer.lr=1e-5. Mistakes in them raise
    core.errors.UserError, and a run that must stop raises core.errors.RunStopped.
    """
    from configs.schema import SLConfig
    from driver.from_python import call_from_python
    from driver.load_recipe import load_recipe

    return call_from_python(lambda: launch(load_recipe(SLConfig, config, overrides)))


def launch(loaded: Loaded[SLConfig]) -> RunResult:
    """Prepare and run; if a process dies and the recipe allows it, resume."""
    from driver.program import launch_run
    from driver.sl.run import prepare, start

    return launch_run(loaded, prepare, start, train)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
