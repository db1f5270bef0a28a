"""Does every algorithm of given rows learn? Each trains the quickstart's warmed-up tiny model on sums.

    python -m tools.benchmarks.supervised_matrix [--seeds 0 1 2] [--only NAME ...] [--write]

Runs main_sl's loop (backend: local) on right sums, on pairs of a right and a wrong sum, or on labelled sums. Measured,
before and after, is the mean reward of sampled answers to 200 other sums, or where a loss only compares, the share of
held-out rows that it gets right. --write puts the rows into the table of algs/README.md. Exit code 1 if one is
below 0.9 in the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

import main_eval
import main_sl
from data_prep import arithmetic, distill
from driver.evaluation.suites.run import EvalReport
from driver.records.run_result import RunResult
from tools.benchmarks.learning_matrix import quietly, warm_up
from tools.benchmarks.matrix_table import write_rows
from tools.benchmarks.processes import read_metrics

HEAD = ("algorithm", "seed", "measure", "before", "after", "reward after", "steps", "seconds")
GOAL = 0.9
TEACHER = "SFT"
"""The model that it trains is the teacher of the stored distributions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """An algorithm, the rows that it trains on, and the measure."""

    alg: dict[str, Any]
    rows: str
    """File below data/, without the ending."""
    steps: int = 60
    metric: str = ""
    """Metric on held-out rows; "": the reward of sampled answers."""


MATRIX: dict[str, Task] = {
    "SFT": Task(alg={"name": "sft"}, rows="right", steps=120),
    "DFT": Task(alg={"name": "sft", "dft": True}, rows="right", steps=120),
    "stored distributions": Task(alg={"name": "distill"}, rows="distilled", steps=120),
    "DPO with NLL": Task(alg={"name": "dpo_nll"}, rows="pairs"),
    "ORPO": Task(alg={"name": "orpo"}, rows="pairs"),
    "DPO": Task(alg={"name": "dpo"}, rows="pairs", metric="pair/accuracy"),
    "WPO": Task(alg={"name": "wpo"}, rows="pairs", metric="pair/accuracy"),
    "AOT": Task(alg={"name": "aot"}, rows="pairs", steps=120, metric="pair/accuracy"),
    "KTO": Task(alg={"name": "kto"}, rows="labelled", steps=240, metric="kto/accuracy"),
    "BCO": Task(alg={"name": "bco"}, rows="labelled", steps=240, metric="bco/accuracy"),
    "offline DRO": Task(alg={"name": "offline_dro"}, rows="scored", metric="offline_dro/accuracy"),
    # with one wrong reply to a sum it fits the pairs it sees, and not others
    "reward model": Task(alg={"name": "reward_model"}, rows="many_pairs", steps=1200, metric="pair/accuracy"),
}
JUDGES = {"reward model"}
"""Rows whose model writes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Result of a run."""

    name: str
    seed: int
    before: float
    after: float
    reward: float | None
    """Reward of sampled answers afterwards; None for a model that writes nothing."""
    seconds: float
    """Seconds of the steps."""


def make_rows(folder: Path) -> None:
    """Write the rows under `folder`/data, and teach the teacher of the stored distributions, after `warm_up`."""
    data = folder / "data"
    # the held-out sums are drawn first, and so are the quickstart's
    sizes = ["--max", "49", "--padded", "--train", "0", "--eval", "200"]
    compared = [*sizes, "--pairs", "1000"]
    quietly(lambda: arithmetic.main(["--out", str(data / "compared"), *compared]))
    quietly(lambda: arithmetic.main(["--out", str(data / "recompared"), *compared, "--copies", "16"]))
    quietly(lambda: arithmetic.main(["--out", str(data / "solved_sums"), *sizes, "--sft", "1000"]))
    (data / "solved_sums" / "sft.parquet").rename(data / "right.parquet")
    (data / "recompared" / "pairs.parquet").rename(data / "compared" / "many_pairs.parquet")
    for name in ("pairs", "many_pairs", "labelled"):
        rows = pq.read_table(data / "compared" / f"{name}.parquet")
        # all rows of a sum are side by side, and so in the same part
        held_out = len(rows) // 5
        pq.write_table(rows.slice(held_out), data / f"{name}.parquet")
        pq.write_table(rows.slice(0, held_out), data / f"{name}_held_out.parquet")
    for name in ("pairs", "pairs_held_out"):
        pairs = pq.read_table(data / f"{name}.parquet").to_pylist()
        scored = [{**row, "completions": [row["chosen"], row["rejected"]], "rewards": [1.0, 0.0]} for row in pairs]
        pq.write_table(pa.Table.from_pylist(scored), data / f"{name.replace('pairs', 'scored')}.parquet")
    learn(TEACHER, 0, folder)
    recipe = folder / "distilled.yaml"
    recipe.write_text(yaml.safe_dump(make_recipe(TEACHER, 0, folder)))
    quietly(lambda: distill.make(str(recipe), str(folder / f"{TEACHER}-0"), data / "distilled.parquet"))


def make_recipe(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Return the recipe of a run."""
    task, data = MATRIX[name], folder / "data"
    held_out = str(data / f"{task.rows}_held_out.parquet") if task.metric else None
    return {
        "name": "supervised-matrix",
        "alg": task.alg,
        "backend": "local",
        "run_dir": str(folder / "runs"),
        "save_to": str(folder / f"{name}-{seed}"),
        "seed": seed,
        "steps": task.steps,
        "rows_per_step": 64,
        "display": "quiet",
        "trainer": {"lr": 4e-4, "lr_schedule": "linear", "warmup_updates": 6},
        "model": {"path": str(folder / "warm"), "dtype": "float32"},
        "data": {"train": str(data / f"{task.rows}.parquet"), "eval": held_out, "max_tokens": 32},
    }


def learn(name: str, seed: int, folder: Path) -> Learnt:
    """Train with one algorithm; the model is saved under its name and the seed."""
    recipe, results = make_recipe(name, seed, folder), list[RunResult]()
    quietly(lambda: results.append(main_sl.run(recipe)))
    [result] = results
    reward = None if name in JUDGES else measure_reward(recipe["save_to"], folder)
    if metric := MATRIX[name].metric:
        before, after = (measured[f"eval/{metric}"] for measured in (result.before, result.after))
    else:
        before, after = measure_reward(recipe["model"]["path"], folder), reward
    assert after is not None
    seconds = sum(step["time/step_s"] for step in read_metrics(result.folder))
    return Learnt(name=name, seed=seed, before=before, after=after, reward=reward, seconds=seconds)


@cache
def measure_reward(model: str, folder: Path) -> float:
    """Return the mean reward of sampled answers to the quickstart's held-out sums."""
    recipe = {
        "name": "supervised-matrix-reward",
        "backend": "local",
        "run_dir": str(folder / "runs"),
        "samples": 4,
        "model": {"path": model, "dtype": "float32"},
        "data": {"sets": [{"path": str(folder / "data" / "eval.parquet")}], "max_prompt_tokens": 32},
        "reward": {"function": "arithmetic"},
        "rollout": {"engine": "hf", "max_new_tokens": 8},
    }
    reports: list[EvalReport] = []
    quietly(lambda: reports.append(main_eval.run(recipe)))
    return reports[0].table[0].metrics["mean"].value


def learn_all(names: list[str], seeds: list[int], folder: Path) -> Iterator[Learnt]:
    """Run all algorithms under `folder`, which has what `warm_up` and `make_rows` wrote."""
    for seed in seeds:
        for name in names:
            yield learn(name, seed, folder)


def list_cells(one: Learnt) -> list[str]:
    """Return the row of the table."""
    task = MATRIX[one.name]
    reward = "-" if one.reward is None else f"{one.reward:.2f}"
    measured = (task.metric or "reward", f"{one.before:.2f}", f"{one.after:.2f}", reward)
    return [one.name, str(one.seed), *measured, str(task.steps), f"{one.seconds:.0f}"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=list(MATRIX), default=list(MATRIX), metavar="NAME")
    parser.add_argument("--write", action="store_true", help="put the rows into the table of algs/README.md")
    args = parser.parse_args(argv)
    rows: list[Learnt] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        warm_up(folder)
        make_rows(folder)
        for one in learn_all(args.only, args.seeds, folder):
            rows.append(one)
            print(f"| {' | '.join(list_cells(one))} |", flush=True)
    if args.write:
        write_rows("supervised matrix", HEAD, [list_cells(one) for one in rows], order=list(MATRIX))
    return int(any(one.after < GOAL for one in rows))


if __name__ == "__main__":
    sys.exit(main())
