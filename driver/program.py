"""Shared part of main_rl.py and main_sl.py: read the recipe, then explain, sweep or run it."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from configs.load import naming_inherited
from configs.schema import RunConfig
from core.cluster.private_ray import refuse_second_ray
from core.text.plain_text import print_line
from driver.load_recipe import Loaded, load_recipe

if TYPE_CHECKING:
    from driver.checkpoint import Checkpoint
    from driver.context import RunContext
    from driver.records.run_result import RunResult

C = TypeVar("C", bound=RunConfig)
R = TypeVar("R")


class Prepared(Protocol):
    """Checked recipe, with the data that its program has loaded."""

    @property
    def loaded(self) -> Loaded[Any]: ...
    @property
    def checkpoint(self) -> Checkpoint | None: ...


P = TypeVar("P", bound=Prepared)


def run_program(file: str, cls: type[C], args: argparse.Namespace, launch: Callable[[Loaded[C]], RunResult]) -> int:
    """Run the command line and return the exit code. file: the program, for the runs of a sweep."""
    from driver.checks.explain import explain
    from driver.sweep import combine_overrides, run_sweep

    if len(combinations := combine_overrides(args.overrides)) > 1:
        return run_sweep(file, cls, args.config, combinations, only_explain=args.explain)
    loaded = load_recipe(cls, args.config, args.overrides)
    if args.explain:
        with naming_inherited(loaded.inherited):
            print_line(explain(loaded), keep="\n")
        return 0
    launch(loaded)
    return 0


def launch_run(
    loaded: Loaded[C],
    prepare: Callable[[Loaded[C]], P],
    start: Callable[[P, RunContext], Awaitable[R]],
    train: Callable[[R], Awaitable[None]],
) -> RunResult:
    """Prepare, start and train; resume after the death of a process if the recipe says so."""
    from driver.context import run_in_context
    from driver.on_failure import run_with_resumes

    # Before the data is loaded, which may take minutes.
    if loaded.cfg.backend == "ray":
        refuse_second_ray()

    # Each attempt prepares anew, since the checkpoint determines step and data position.
    def attempt(loaded: Loaded[C]) -> RunResult:
        prepared = prepare(loaded)

        async def body(context: RunContext) -> None:
            await train(await start(prepared, context))

        return run_in_context(prepared.loaded.cfg, body, prepared.checkpoint)

    with naming_inherited(loaded.inherited):
        return run_with_resumes(attempt, loaded)
