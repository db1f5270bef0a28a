"""Replay a captured step with the run's loss and others:

    python -m analysis.capture.replay runs/RUN/snapshots/step_00010 --alg grpo --alg my_loss.py [--model FOLDER]

The first row is the run's own loss: loss and gradient norm are compared with the recorded values. Every other loss
computes advantages from the same samples and is compared with the first.

Exit code: 0 reproduced, 1 not, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from core.cli import Parser, run_guarded
from core.text.plain_text import print_line


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. No heavy import happens before this returns."""
    parser = Parser(
        "python -m analysis.capture.replay",
        description="Compute a captured step again, with its own loss and with others.",
    )
    parser.add_argument("snapshot", type=Path, metavar="SNAPSHOT", help="such as runs/RUN/snapshots/step_00010")
    parser.add_argument(
        "--alg",
        action="append",
        default=[],
        metavar="LOSS",
        help="a loss to compare: a name of algs/, a file, or '{as: dr_grpo, name: grpo, loss_norm: constant}'",
    )
    parser.add_argument("--model", metavar="FOLDER", help="folder with the weights, where the snapshot has none")
    parser.add_argument("--update", type=int, default=0, metavar="N", help="update of the step, from 0 (default: 0)")
    parser.add_argument("--tolerance", type=float, help="largest relative difference that counts as reproduced")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write an HTML page too, with a map of every token")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    from analysis.capture.recompute import replay
    from analysis.capture.table import describe_replay

    found = replay(
        args.snapshot,
        read_losses(args.alg),
        model=args.model,
        update=args.update,
        tolerance=args.tolerance,
        with_maps=args.page is not None,
    )
    print_line(json.dumps(found.to_json(), indent=1) if args.json else describe_replay(found), keep="\n")
    if args.page is not None:
        from analysis.report.replay_page import write_replay_page

        # with --json, standard output holds the JSON and nothing else
        print_line(write_replay_page(found, args.page), file=sys.stderr if args.json else sys.stdout)
    # None is no failure: the run skipped the update, so there is nothing to compare with
    return 1 if found.is_reproduced is False else 0


def read_losses(given: Sequence[str]) -> list[str | dict[str, object]]:
    """Return the losses as a recipe would hold them. Raises UserError for anything else."""
    import yaml

    from core.errors import UserError, first_line

    losses: list[str | dict[str, object]] = []
    for text in given:
        try:
            one = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"--alg {text!r:.100} is not a name, a file or a section: {first_line(error)}") from error
        if not isinstance(one, str | dict):
            raise UserError(f"--alg {text!r:.100} is not a name, a file or a section")
        losses.append(one)
    return losses


if __name__ == "__main__":
    sys.exit(run_guarded(partial(main, sys.argv[1:])))
