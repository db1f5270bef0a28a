"""What do logging, tracking and capturing cost a step? python -m tools.benchmarks.logging_cost [RUN ...]

The driver's clock tells: the seconds of its phases log and capture, as a share of all steps. RUN is a run folder, whose
metrics.jsonl has them. Without one, the quickstart's recipe is run twice for --steps steps (its model is made by make
quickstart). One run is as it is, the other with all trackers that are installed, tables of samples at every step and a
snapshot at every tenth. The first steps are not counted. Exit code 1 where the share is above the goal.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from core import metrics as names
from core.timing.phases import Phase, time_metric
from tools.benchmarks.overlap import WARM_UP, measure
from tools.benchmarks.processes import ROOT, read_metrics

GOAL = 0.01
COUNTED = (Phase.LOG, Phase.CAPTURE)
PACKAGES = ("mlflow", "wandb", "tensorboard")


def compute_shares(lines: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the share of the steps' seconds that each phase took.

    >>> compute_shares([{"time/step_s": 9.0, "time/log_s": 0.1}, {"time/step_s": 1.0, "time/capture_s": 0.3}])
    {'log': 0.01, 'capture': 0.03}
    """
    whole = sum(line[names.STEP_SECONDS] for line in lines)
    return {str(phase): sum(line.get(time_metric(phase), 0.0) for line in lines) / whole for phase in COUNTED}


def read_shares(folder: Path) -> tuple[dict[str, float], float]:
    """Return the shares of a run without its first steps, and the mean seconds of a step."""
    rows = read_metrics(folder)
    # the first steps load libraries and files, which a long run does once
    lines = rows[WARM_UP:] if len(rows) > WARM_UP else rows
    return compute_shares(lines), sum(line[names.STEP_SECONDS] for line in lines) / len(lines)


def run_quickstart(steps: int, place: Path) -> dict[str, Path]:
    """Run the quickstart's recipe in two ways; return their run folders."""
    recipe = ROOT / "configs" / "quickstart.yaml"
    always = [f"steps={steps}", "data.eval=null"]
    there = ["jsonl", *(name for name in PACKAGES if importlib.util.find_spec(name) is not None)]
    more = [f"trackers=[{','.join(there)}]", "tracking.samples_every=1", "capture.every=10"]
    if "wandb" in there:
        # no network: its speed would be measured, and not ours
        more.append("tracking.wandb_mode=offline")
    return {
        "as it is": measure(recipe, place / "plain", *always)[0],
        f"{' '.join(there)}, snapshots": measure(recipe, place / "all", *always, *more)[0],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.logging_cost", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders; without any, the quickstart is run")
    parser.add_argument("--steps", type=int, default=22)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as place:
        folders = {run: Path(run) for run in args.runs} or run_quickstart(args.steps, Path(place))
        found = {name: read_shares(folder) for name, folder in folders.items()}
    print(f"{'s/step':>8}" + "".join(f"{phase:>10}" for phase in (*COUNTED, "together")))
    for name, (shares, seconds) in found.items():
        each = [shares[phase] for phase in COUNTED]
        print(f"{seconds:>8.2f}" + "".join(f"{share:>10.2%}" for share in (*each, sum(each))) + f"   {name}")
    missed = any(sum(shares.values()) > GOAL for shares, _ in found.values())
    print(f"goal, at most {GOAL:.0%} of the steps: {'missed' if missed else 'reached'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
