"""Check a set-up and explain engine-trainer mismatch: python -m analysis.doctor RUN_OR_CONFIG [key=value ...]

First the set-up: versions, memory, disk, network, model, data, reward; every check is shown, not just the first that
fails. Then the recipe's engine samples some sequences, and its trainer scores them. Where the two disagree, one thing
at a time is changed, to find the cause. Nothing is trained, and nothing is written. With --knob, prices of vLLM's
options are measured instead.

Exit code: 0 all is well; 1 an error of the set-up, or a mismatch; 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from core.cli import Parser, run_guarded
from core.errors import UserError
from core.text.plain_text import print_line

SEQUENCES, TOKENS = 32, 64


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exit with code 2 for a bad value. No heavy import happens before this returns."""
    parser = Parser(
        "feynrl doctor",
        description="Check a set-up before a long run, and find the cause where engine and trainer disagree.",
    )
    parser.add_argument("target", metavar="RUN_OR_CONFIG", help="a run folder, or a YAML recipe; see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as model.path=models/mine")
    parser.add_argument("--setup", action="store_true", help="check the set-up only, and start no engine")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of lines")
    parser.add_argument(
        "--sequences", type=int, default=SEQUENCES, metavar="N", help="sequences to sample (default %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, metavar="N", help="longest completion to sample (default %(default)s)"
    )
    parser.add_argument(
        "--bound",
        type=float,
        metavar="NATS",
        help="mean difference of log-probabilities that is no mismatch (default: that of the weight sync's proof)",
    )
    parser.add_argument(
        "--knob",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="measure log-probabilities, speed and memory with this option of rollout.vllm, or quantization",
    )
    args = parser.parse_args(argv)
    if args.sequences < 4 or args.tokens < 2 or (args.bound is not None and not args.bound > 0):
        parser.error("--sequences must be 4 or more, --tokens 2 or more, and --bound above 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    from analysis.doctor.bench import Sampling
    from analysis.doctor.examine import examine
    from analysis.doctor.knobs import price_knobs, read_knobs
    from analysis.doctor.recipe_checks import check_recipe
    from analysis.doctor.setup_checks import check_setup
    from analysis.doctor.target import find_target
    from configs.schema import RLConfig

    def say(line: str) -> None:
        if not args.json:
            print_line(line, keep="\n")

    target = find_target(args.target, args.overrides)
    cfg = target.loaded.cfg
    knobs = read_knobs(args.knob, cfg) if isinstance(cfg, RLConfig) else []
    if args.knob and not knobs:
        raise UserError(f"--knob measures the engine of an RL recipe, and {args.target} has none: leave it out")
    say(target.describe())
    findings = check_setup(target.loaded, say)
    of_recipe, prepared = check_recipe(target.loaded, say, findings)
    findings += of_recipe
    errors = sum(f.level == "error" for f in findings)
    report: dict[str, Any] = {"target": target.describe(), "setup": [asdict(f) for f in findings]}
    say(f"set-up: {describe_counts(errors, sum(f.level == 'warning' for f in findings))}")
    code = 1 if errors else 0
    if not args.setup and isinstance(cfg, RLConfig):
        if prepared is None or errors:
            say("the engine is not compared with the trainer: fix the errors first")
        else:
            sampling = Sampling(sequences=args.sequences, tokens=args.tokens, bound=args.bound)
            if knobs:
                prices = price_knobs(target, prepared, sampling, knobs, say)
                report["knobs"] = [price.to_json() for price in prices]
            else:
                examined = examine(target, prepared, sampling, say)
                report["mismatch"] = examined.to_json()
                # an unknown cause is a mismatch too
                code = 0 if examined.verdict.kind == "none" else 1
    if args.json:
        print(json.dumps(report, indent=1))
    return code


def describe_counts(errors: int, warnings: int) -> str:
    """
    >>> describe_counts(0, 2), describe_counts(1, 0)
    ('no error, 2 warnings', '1 error, no warning')
    """

    def count(n: int, what: str) -> str:
        return f"{n or 'no'} {what}{'s' if n > 1 else ''}"

    return f"{count(errors, 'error')}, {count(warnings, 'warning')}"


if __name__ == "__main__":
    sys.exit(run_guarded(main))
