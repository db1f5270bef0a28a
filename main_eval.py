"""Evaluation: python main_eval.py --config configs/eval_quickstart.yaml [key=value ...]

The same engines, rewards and data as reinforcement learning; nothing is trained. Every sample is stored in Parquet.
A killed evaluation continues with `resume`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from core.cli import parse_arguments, run_guarded
from core.text.plain_text import print_line

if TYPE_CHECKING:
    from configs.eval_schema import EvalConfig
    from driver.context import RunContext
    from driver.evaluation.suites.run import EvalReport, EvalRun
    from driver.evaluation.suites.table import TableRow


async def evaluate(run: EvalRun) -> list[TableRow]:
    """Sample every prompt, grade the samples and write the results; return their table."""
    await run.sample_all()
    return run.report()


def main() -> int:
    args = parse_arguments("Evaluate a model on data sets.")
    cfg = load(args.config, args.overrides)
    if args.explain:
        from driver.evaluation.suites.setup import explain_eval

        print_line(explain_eval(cfg), keep="\n")
        return 0
    launch(cfg)
    return 0


def run(config: str | Mapping[str, Any], overrides: Sequence[str] = ()) -> EvalReport:
    """Evaluate from Python, in a notebook too, and return the table and the folder with the samples.

    config: the path of a recipe, or its keys and values. overrides: such as model.path=models/mine. Mistakes in them
    raise core.errors.UserError, and an evaluation that must stop raises core.errors.RunStopped.
    """
    from driver.from_python import call_from_python

    return call_from_python(lambda: launch(load(config, overrides)))


def load(config: str | Mapping[str, Any], overrides: Sequence[str]) -> EvalConfig:
    """Read and check a recipe."""
    from core.loading import needs_part

    with needs_part("main_eval.py", otherwise="set data.eval in a recipe of main_rl.py"):
        from driver.evaluation.suites.setup import load_eval_recipe

    return load_eval_recipe(config, overrides)


def launch(cfg: EvalConfig) -> EvalReport:
    """Prepare, sample and grade."""
    from core.cluster.private_ray import refuse_second_ray
    from driver.context import run_in_context
    from driver.evaluation.suites.run import EvalReport
    from driver.evaluation.suites.setup import prepare_eval, start_eval

    if cfg.backend == "ray":
        refuse_second_ray()
    prepared = prepare_eval(cfg)
    table: list[TableRow] = []

    async def body(context: RunContext) -> None:
        table.extend(await evaluate(await start_eval(prepared, context)))

    result = run_in_context(cfg, body)
    return EvalReport(folder=result.folder, table=table)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
