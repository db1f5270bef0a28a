"""Evaluation: python main_eval.py --config configs/eval_quickstart.yaml [key=value ...]

The same engines, rewards and data as reinforcement learning; nothing is trained. Every sample is kept, in Parquet. An
evaluation that was killed goes on where it was with `resume`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from core.cli import parse_arguments, run_guarded

if TYPE_CHECKING:
    from driver.context import RunContext
    from driver.evaluation.suites.run import EvalRun


async def evaluate(run: EvalRun) -> None:
    """Sample every prompt, grade the samples and write the results."""
    await run.sample_all()
    run.report()


def main() -> int:
    args = parse_arguments("main_eval.py", "Evaluate a model on data sets.")
    from driver.context import run_in_context
    from driver.evaluation.suites.explain import explain_eval
    from driver.evaluation.suites.setup import load_eval_recipe, prepare_eval, start_eval

    cfg = load_eval_recipe(args.config, args.overrides)
    if args.explain:
        print(explain_eval(cfg))
        return 0
    prepared = prepare_eval(cfg)

    async def body(context: RunContext) -> None:
        await evaluate(await start_eval(prepared, context))

    run_in_context(cfg, body)
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
