"""Speed-up by overlap, measured on the whole program: python -m tools.benchmarks.overlap [--real]

Simulated times: the real main_rl.py on Ray actors with DeepSpeed, real weight sync and an engine of its own that
sleeps where it would generate; its loss sleeps where a larger model would compute. Generation and training take the
same --seconds of a step, so nothing could be faster than twice the synchronous run. The simulator
(tools/benchmarks/simulate.py) is given what the synchronous run measured, and predicts both. Exit code 1 where overlap
is not 1.8 times as fast, or a prediction is off by more than a tenth.

--real: the quickstart's recipe and model instead (made by make quickstart), nothing simulated, on whatever this machine
has. Trainer and engine share its cores, so that little is to be gained on a small one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import yaml

from data_prep import arithmetic, tiny_model
from tools.benchmarks.processes import ROOT, print_row, read_metrics
from tools.benchmarks.simulate import forecast, times_of

GOAL, TOLERANCE = 1.8, 0.1
WARM_UP = 2
"""Steps that are not timed."""
ENGINE = """
import asyncio, random
from rollouts.engines.base import Completion
from rollouts.engines.hf import HfEngine
class Engine(HfEngine):
    async def generate(self, token_ids, *, max_new_tokens, seed):
        await asyncio.sleep({seconds} * (0.9 + 0.1 * random.Random(seed).random()))
        return Completion(token_ids=[min(self.stop)], logp=[-1.0], versions=[self.version], stop="eos")
"""
LOSS = """
import time
from algs.grpo import GRPO
class Sleepy(GRPO):
    def loss(self, policy, tokens):
        time.sleep({seconds})
        return super().loss(policy, tokens)
"""


def sleepy(folder: Path, seconds: float, steps: int) -> Path:
    """Return a recipe whose generation and training take `seconds` of every step each."""
    tiny_model.main(["--out", str(folder / "model")])
    arithmetic.main(["--out", str(folder / "data"), "--max", "9", "--train", "30", "--eval", "10", "--sft", "15"])
    for name, text in {"engine": ENGINE, "loss": LOSS}.items():
        (folder / f"{name}.py").write_text(text.format(seconds=seconds))
    recipe = {
        "name": "sleepy",
        "steps": steps,
        "groups_per_step": 8,
        "group_size": 2,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "alg": {"file": str(folder / "loss.py")},
        "data": {"train": str(folder / "data" / "train.parquet"), "max_prompt_tokens": 32},
        "reward": {"function": "arithmetic", "workers": 1},
        "rollout": {"engine": str(folder / "engine.py"), "max_new_tokens": 8},
    }
    path = folder / "sleepy.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def measure(recipe: Path, run_dir: Path, *overrides: str) -> tuple[Path, float]:
    """Run a recipe; return the run folder and the mean seconds of a step."""
    command = [sys.executable, "main_rl.py", "--config", str(recipe), f"run_dir={run_dir}", *overrides]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    [folder] = (file.parent for file in run_dir.glob("*/metrics.jsonl"))  # a tracker may keep its store there too
    rows = read_metrics(folder)[WARM_UP:]
    return folder, sum(row["time/step_s"] for row in rows) / len(rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.overlap", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of generation, and of training, in a step")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--real", action="store_true", help="the quickstart's model and task, nothing simulated")
    args = parser.parse_args(argv)
    missed = False
    faster: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        recipe = ROOT / "configs" / "quickstart.yaml" if args.real else sleepy(folder, args.seconds, args.steps)
        # evaluations would stand between the steps that are timed
        always = [f"steps={args.steps}", *(["data.eval=null"] if args.real else [])]
        synchronous, base = measure(recipe, folder / "lag_0", *always)
        times, schedule = times_of(synchronous)
        print(f"{'max_staleness':>8}{'s/step':>9}{'speed-up':>10}{'predicted s/step':>18}{'off by':>8}")
        for max_staleness in (0, *args.max_staleness):
            seconds = base
            if max_staleness:
                _, seconds = measure(recipe, folder / f"lag_{max_staleness}", *always, f"max_staleness={max_staleness}")
            predicted = forecast(
                # sleeping engines have no limit, so all groups of a step run at a time
                replace(schedule, max_staleness=max_staleness),
                times,
                engines=1,
                concurrent=schedule.per_step * 8,
            )
            off = predicted.step_seconds / seconds - 1
            row = f"{max_staleness:>8}{seconds:>9.2f}{base / seconds:>10.2f}{predicted.step_seconds:>18.2f}{off:>8.1%}"
            print(row, flush=True)
            if max_staleness:
                faster.append(f"{base / seconds:.2f} times the steps per second with `max_staleness={max_staleness}`")
            # without staleness there is nothing to overlap, and only the prediction is judged
            missed |= abs(off) > TOLERANCE or (max_staleness > 0 and base / seconds < GOAL)
    if args.real:
        print("the prediction gives trainer and engine devices of their own; where they share cores it does not hold")
        return 0
    print_row(", ".join(faster))
    print(f"goal, {GOAL:g} times as fast and predicted within {TOLERANCE:.0%}: {'missed' if missed else 'reached'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
