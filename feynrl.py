"""FeynRL as a command, `feynrl rl --config FILE [key=value ...]`, and from Python, `feynrl.run_rl(config, overrides)`.

Both need the link to this clone that `make install` or `pip install --editable .` makes. Python looks into the current
folder first, so a `core` of yours there hides ours when you import feynrl; the command does not look there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from driver.evaluation.suites.run import EvalReport
    from driver.records.run_result import RunResult

PROGRAMS = {
    "rl": ("main_rl", "train a policy by reinforcement learning"),
    "sl": ("main_sl", "train a model on given text"),
    "eval": ("main_eval", "evaluate a model on data sets"),
    "doctor": ("analysis.doctor.__main__", "check a set-up, and find why engine and trainer disagree"),
    "report": ("analysis.report.__main__", "make one HTML file of one or more run folders"),
}
"""Module of each command, whose `main` reads sys.argv, and what the command is for."""


def main() -> int:
    """Run the program that the first word names, with the other words, and return its exit code."""
    lines = "\n".join(f"  {name:<8} {purpose}" for name, (_, purpose) in PROGRAMS.items())
    parser = argparse.ArgumentParser(
        "feynrl",
        usage=f"feynrl {'|'.join(PROGRAMS)} ...",
        description=f"commands:\n{lines}\n\nfeynrl COMMAND --help tells what a command takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=PROGRAMS, metavar="COMMAND", help=argparse.SUPPRESS)
    command: str = parser.parse_args(sys.argv[1:2]).command
    sys.argv = [f"feynrl {command}", *sys.argv[2:]]
    from core.cli import run_guarded

    return run_guarded(lambda: load_program(command).main())


def load_program(command: str) -> Any:
    """Import the program of a command. Raises PartMissing for one of analysis/, where that is gone."""
    from core.loading import needs_part

    with needs_part(f"feynrl {command}", otherwise="use another command"):
        return import_module(PROGRAMS[command][0])


def run_rl(config: str | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunResult:
    """Train a policy by reinforcement learning: see main_rl.run."""
    import main_rl

    return main_rl.run(config, overrides)


def run_sl(config: str | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunResult:
    """Train a model on given text: see main_sl.run."""
    import main_sl

    return main_sl.run(config, overrides)


def run_eval(config: str | Mapping[str, Any], overrides: Sequence[str] = ()) -> EvalReport:
    """Evaluate a model on data sets: see main_eval.run."""
    import main_eval

    return main_eval.run(config, overrides)


if __name__ == "__main__":
    sys.exit(main())
