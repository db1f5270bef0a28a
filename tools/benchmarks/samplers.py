"""Samplers: how many samples reach 0.9 on held-out sums? python -m tools.benchmarks.samplers --out FOLDER [--runs N]

Four arms: rows drawn uniformly or by Thompson sampling, each with and without the filter of groups without a signal
(alg.dynamic_sampling). The quickstart's warmed-up tiny model trains on a mixture of 475 learnable sums, 300 impossible
ones (whose reward is always 0) and 300 trivial ones (always 1), with backend: local and the engine hf. Counted are all
samples that were generated before the held-out reward is at least 0.9, those of rejected groups included.

Every run leaves a file in FOLDER/results. A command makes the next --runs runs (1) of --arms and --seeds that are
missing, and prints the table of all that are there, with the 95 % interval of the mean over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

import main_rl
from driver.records.run_result import RunResult
from tools.benchmarks.learning_matrix import GOAL, quietly, warm_up
from tools.benchmarks.matrix_table import make_table
from tools.benchmarks.processes import ROOT, read_metrics

ARMS: dict[str, tuple[str, bool]] = {
    "uniform": ("uniform", False),
    "thompson": ("thompson", False),
    "uniform, filter": ("uniform", True),
    "thompson, filter": ("thompson", True),
}
"""Sampler, and alg.dynamic_sampling."""
STEPS, EVAL_EVERY = 80, 2
DEAD = 300
"""Impossible rows, and trivial rows."""
REWARD = '''
def score(prompt, messages):
    """Exact match of a learnable sum; 0 or 1 whatever the reply of another."""
    fixed = prompt.extra.get("fixed")
    right = messages[-1]["content"].split() == prompt.answer.split()
    return {"correct": float(right if fixed is None else fixed)}
'''
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t with 1 to 10 degrees of freedom."""
HEAD = ("arm", "seeds", f"at {GOAL:g}", "samples", "95 % interval", "beside uniform", "steps", "best", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Result of a run."""

    arm: str
    seed: int
    samples: int
    """Samples until the goal; all samples of the run if it was not reached."""
    reached: bool
    steps: int
    best: float
    """Largest held-out reward."""
    seconds: float
    """Seconds of the steps."""


def make_data(folder: Path) -> None:
    """Write the mixture and the reward under `folder`, after `warm_up`."""
    data = folder / "data"
    rows: list[dict[str, Any]] = [{**row, "fixed": None} for row in pq.read_table(data / "train.parquet").to_pylist()]
    taught = {row["messages"][0]["content"]: row for row in pq.read_table(data / "sft.parquet").to_pylist()}
    dead = [taught[asked] for asked in sorted(taught)][: 2 * DEAD]
    for i, row in enumerate(dead):
        fixed = float(i % 2)
        messages = row["messages"][:1]
        rows.append({**row, "id": f"{('impossible', 'trivial')[i % 2]}/{i}", "messages": messages, "fixed": fixed})
    pq.write_table(pa.Table.from_pylist(rows), data / "mixed.parquet")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def make_recipe(arm: str, seed: int, folder: Path, *, steps: int = STEPS) -> dict[str, Any]:
    """Return the recipe of a run: the quickstart's, but for data, order and end."""
    sampler, has_filter = ARMS[arm]
    recipe = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text(encoding="utf-8"))
    data = {"train": str(folder / "data/mixed.parquet"), "eval": str(folder / "data/eval.parquet")}
    return recipe | {
        "name": "samplers",
        "backend": "local",
        "run_dir": str(folder / "runs"),
        "display": "quiet",
        "seed": seed,
        "steps": steps,
        "eval_every": EVAL_EVERY,
        "stop_when": {"metric": "eval/reward/mean", "above": GOAL - 1e-9},
        "model": {"path": str(folder / "warm"), "dtype": "float32"},
        "alg": {"name": "grpo", "dynamic_sampling": has_filter},
        "data": recipe["data"] | data | {"sampler": sampler},
        "reward": {"function": str(folder / "reward.py")},
        "rollout": {"engine": "hf", "max_new_tokens": 8},
        # no schedule: arms end after different numbers of steps
        "trainer": {"lr": 4e-4, "warmup_updates": min(16, steps)},
    }


def measure(arm: str, seed: int, folder: Path, *, steps: int = STEPS) -> Measured:
    """Run one arm with one seed."""
    recipe, results = make_recipe(arm, seed, folder, steps=steps), list[RunResult]()
    quietly(lambda: results.append(main_rl.run(recipe)))
    [result] = results
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluated = {int(line["step"]): line["eval/reward/mean"] for line in lines if "eval/reward/mean" in line}
    done = read_metrics(result.folder)
    end = min((step for step, reward in evaluated.items() if reward >= GOAL), default=None)
    counted = done[:end]
    return Measured(
        arm=arm,
        seed=seed,
        samples=int(sum(line["rollout/groups_drawn"] for line in counted)) * recipe["group_size"],
        reached=end is not None,
        steps=len(counted),
        best=max(evaluated.values()),
        seconds=sum(line["time/step_s"] for line in counted),
    )


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean (Student's t); None for fewer than two values.

    >>> low, high = interval([1.0, 2.0, 3.0])
    >>> round(low, 2), round(high, 2)
    (-0.48, 4.48)
    """
    n = len(values)
    if n < 2:
        return None
    quantile = QUANTILES[n - 2] if n - 2 < len(QUANTILES) else 1.96
    half = quantile * statistics.stdev(values) / math.sqrt(n)
    return statistics.mean(values) - half, statistics.mean(values) + half


def list_rows(results: Iterable[Measured]) -> list[list[str]]:
    """Return the rows of the table. A run that did not reach the goal counts with all its samples, a lower bound."""
    by_arm = {arm: [one for one in results if one.arm == arm] for arm in ARMS}
    base = {one.seed: one.samples for one in by_arm["uniform"]}
    rows: list[list[str]] = []
    for arm, own in by_arm.items():
        if not own:
            continue
        samples = [float(one.samples) for one in own]
        found = interval(samples)
        # of the same seeds: they share the model, the rows and their order at the start
        ratios = [one.samples / base[one.seed] for one in own if one.seed in base]
        reached = sum(one.reached for one in own)
        rows.append(
            [
                arm,
                str(len(own)),
                f"{reached} of {len(own)}",
                ("" if reached == len(own) else ">= ") + f"{statistics.mean(samples):,.0f}",
                "-" if found is None else f"{found[0]:,.0f} to {found[1]:,.0f}",
                f"{statistics.geometric_mean(ratios):.2f}" if ratios else "-",
                f"{statistics.mean(one.steps for one in own):.0f}",
                f"{max(one.best for one in own):.2f}",
                f"{statistics.mean(one.seconds for one in own):.0f}",
            ]
        )
    return rows


def read_results(folder: Path) -> list[Measured]:
    """Return the results that earlier commands left."""
    files = sorted((folder / "results").glob("*.json"))
    return [Measured(**json.loads(file.read_text(encoding="utf-8"))) for file in files]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.samplers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the model, the rows and the results")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs", type=int, default=1, help="runs to make now; 0 prints the table")
    parser.add_argument("--steps", type=int, default=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    folder: Path = args.out
    (folder / "results").mkdir(parents=True, exist_ok=True)
    there = {(one.arm, one.seed) for one in read_results(folder)}
    # seed by seed, so that the arms can be compared early
    missing = [(arm, seed) for seed, arm in product(args.seeds, args.arms) if (arm, seed) not in there]
    torch.set_num_threads(1)
    for arm, seed in missing[: args.runs]:
        if not (folder / "reward.py").is_file():
            warm_up(folder)
            make_data(folder)
        result = measure(arm, seed, folder, steps=args.steps)
        file = folder / "results" / f"{arm.replace(', ', '-')}-{seed}.json"
        file.write_text(json.dumps(asdict(result)) + "\n", encoding="utf-8")
        print(json.dumps(asdict(result)), flush=True)
    results = read_results(folder)
    print(make_table(HEAD, list_rows(results)), end="")
    left = max(0, len(missing) - args.runs)
    print(f"{len(results)} runs are there, {left} are missing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
