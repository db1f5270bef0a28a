"""Does every algorithm learn? Each takes the quickstart's warmed-up tiny model to 0.9 reward through the real loop.

    python -m tools.benchmarks.learning_matrix [--seeds 0 1 2] [--only NAME ...] [--write] [--curves FILE]

Runs main_rl's loop (backend: local, engine: hf), two runs at a time, and prints the steps and seconds each took.
--write puts the rows into the table of algs/README.md. --curves puts the rewards of every step of seed 0 into a JSON
file, which tools/benchmarks/learning_curves.py draws. Exit code 1 if one did not get there. Algorithms of given rows
are in tools/benchmarks/supervised_matrix.py.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

import main_rl
import main_sl
from configs.schema import RLConfig, SLConfig
from core.types.samples import Group
from data_prep import arithmetic, tiny_model
from driver.context import RunContext, run_in_context
from driver.load_recipe import load_recipe
from driver.rl.setup import prepare, start
from driver.sl.run import prepare as prepare_sl
from driver.sl.run import start as start_sl
from tools.benchmarks.learning_curves import keep
from tools.benchmarks.matrix_table import make_table, write_rows
from tools.benchmarks.processes import ROOT, read_metrics

GOAL = 0.9
HEAD = ("algorithm", "seed", "reward at first", "best", f"steps to {GOAL:g}", "seconds")
STEPS = 32
"""At most: a run ends at the step that reaches the goal."""
TEACHER = "GRPO"
"""Trains on to its last step where a row of the same call distils it."""


def of_recipe(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())["alg"]


MATRIX: dict[str, dict[str, Any]] = {
    "GRPO": {"name": "grpo"},
    "GRPO as published": {
        "name": "grpo",
        "scale_rewards": "group",
        "loss_norm": "sequence",
        "clip_high": 0.2,
        "kl": {"coef": 0.001, "estimator": "k3"},
    },
    "Dr. GRPO": of_recipe("dr_grpo"),
    "DAPO": of_recipe("dapo"),
    "MaxRL": of_recipe("maxrl"),
    "decoupled PPO": of_recipe("decoupled_ppo"),
    "PPO": of_recipe("ppo"),
    "CISPO": {"name": "cispo"},
    "GSPO, sequence": {"name": "gspo", "clip_low": 0.01, "clip_high": 0.01},
    "GSPO, token": {"name": "gspo", "form": "token", "clip_low": 0.01, "clip_high": 0.01},
    "RLOO": {"name": "rloo"},
    "REINFORCE++": {"name": "reinforce_pp"},
    "REINFORCE++, baseline": {"name": "reinforce_pp", "baseline": True},
    "DPPO": {"name": "dppo"},
    "SAPO": {"name": "sapo"},
    "GMPO": {"name": "gmpo"},
    "P3O": {"name": "p3o"},
    "P4O": {"name": "p4o"},
    "IPO of prime-rl": {"name": "ipo_rl"},
    "DRO": {"name": "dro"},
    "VESPO": {"name": "vespo"},
    "GPG": {"name": "gpg"},
    "OPO": {"name": "opo"},
    "RAE": {"name": "rae"},
    "adaptive KL": {"name": "grpo", "kl": {"coef": 0.01, "target": 0.05, "horizon": 1000}},
    "adaptive entropy": {"name": "grpo", "adaptive_entropy": {"target": 0.2}},
    "pass@k": {"name": "passk"},
    "RAFT": {"name": "raft"},
    "RAFT++": {"name": "raft", "clip": 0.2},
    "TOPR": {"name": "topr"},
    "QAE": {"name": "qae"},
    "ERC": {"name": "erc"},
    "M2PO": {"name": "m2po"},
    "Clip-Cov": {"name": "clip_cov"},
    "KL-Cov": {"name": "kl_cov"},
    "the 80/20 rule": {"name": "top_entropy"},
    "ScaleRL": {"name": "scalerl"},
    "GDPO": {"name": "gdpo"},
    "GRPO with positive NLL": {"name": "positive_nll"},
    "CHORD": {"name": "chord"},
    "LUFFY": {"name": "luffy"},
    "GRPO and SFT, by source": {"by_source": {"train": {"name": "grpo"}, "solved": {"name": "sft"}}},
    "optimal token baseline": {"name": "otb"},
    "tilted PPO": {"name": "tilted"},
    "GKD": {"name": "gkd", "teacher": TEACHER},
    "MiniLLM": {"name": "minillm", "teacher": TEACHER},
    "on-policy distillation": {"name": "opd", "teacher": TEACHER},
    "self-distillation from the answer": {"name": "opsd", "hint": "({answer})"},
    "SDPO": {"name": "sdpo", "shown": "({solution})"},
    "GRPO, LoRA": {"name": "grpo"},
    "GRPO, QLoRA": {"name": "grpo"},
    "GRPO, top-p 0.9": {"name": "grpo"},
}
HINTED = {"self-distillation from the answer", "SDPO"}
"""Rows whose warmed-up model also copies an answer that stands in its prompt."""
SETTINGS = {"GRPO, top-p 0.9": {"rollout.top_p": 0.9}, "GRPO, QLoRA": {"model.quantization": "nf4"}}
"""Other keys of the rows that change them."""
SOURCES = {"CHORD": ["solved"], "LUFFY": ["solved"], "GRPO and SFT, by source": ["train", "solved"]}
"""Data sets of the rows that read demonstrations: `solved` has one to each of the quickstart's sums."""
RECIPES = {"GRPO, LoRA": "quickstart_lora", "GRPO, QLoRA": "quickstart_lora"}
"""Recipes of the rows that do not use the quickstart's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    seed: int
    start: float
    """Mean reward of the first step."""
    best: float
    rewards: list[float]
    """Mean reward of every step."""
    steps: int | None
    """Steps until the mean reward of one was at least GOAL; None if none was."""
    seconds: float


class Reached(Exception):
    """End of a run that is good enough."""


def quietly(run: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        run()


def warm_up(folder: Path) -> None:
    """Make the quickstart's model, data and supervised warm-up, under `folder`."""

    def work() -> None:
        tiny_model.main(["--out", str(folder / "model"), "--hidden-size", "128", "--heads", "4"])
        sizes = ["--max", "49", "--padded", "--train", "475", "--eval", "200", "--sft", "600"]
        arithmetic.main(["--out", str(folder / "data"), *sizes, "--copies", "24", "--wrong-share", "0.66"])

    quietly(work)
    solve(folder)
    teach(folder, "sft", "warm")


def solve(folder: Path) -> None:
    """Write the quickstart's sums with their answers as demonstrations."""
    rows = pq.read_table(folder / "data" / "train.parquet").to_pylist()
    solved = [{**row, "id": f"{row['id']}/solved", "demonstration": row["answer"]} for row in rows]
    pq.write_table(pa.Table.from_pylist(solved), folder / "data" / "solved.parquet")


def warm_up_with_hints(folder: Path) -> None:
    """Make a model that was taught every row also with its reply in the prompt, right or wrong, after `warm_up`."""
    rows = pq.read_table(folder / "data" / "sft.parquet").to_pylist()
    shown: list[dict[str, Any]] = []
    for row in rows:
        asked, reply = row["messages"]
        hinted = {**asked, "content": f"{asked['content']}({reply['content']})"}
        shown.append({**row, "id": f"{row['id']}/hinted", "messages": [hinted, reply]})
    both = [row for pair in zip(rows, shown, strict=True) for row in pair]
    pq.write_table(pa.Table.from_pylist(both), folder / "data" / "hinted.parquet")
    teach(folder, "hinted", "hinted", "rows_per_step=512")


def teach(folder: Path, rows: str, saved: str, *more: str) -> None:
    """Train the quickstart's model on rows, and save it under a name."""

    def work() -> None:
        paths = [f"model.path={folder / 'model'}", f"data.train={folder / 'data' / rows}.parquet"]
        where = [f"save_to={folder / saved}", f"run_dir={folder / 'runs'}", "backend=local", *more]
        prepared = prepare_sl(load_recipe(SLConfig, str(ROOT / "configs/quickstart_sft.yaml"), [*paths, *where]))

        async def body(context: RunContext) -> None:
            await main_sl.train(await start_sl(prepared, context))

        run_in_context(prepared.loaded.cfg, body)

    quietly(work)


def learn(name: str, seed: int, folder: Path, teaches: bool = False) -> Row:
    """Train the warmed-up model by a row of MATRIX, to the goal; one that teaches to its last step, and save it."""
    alg = dict(MATRIX[name])
    teacher = folder / f"{TEACHER}-{seed}"
    if alg.get("teacher") == TEACHER:
        alg["teacher"] = str(teacher)
        # the teacher is the model that GRPO trained with the same seed
        if not teacher.exists():
            learn(TEACHER, seed, folder, teaches=True)
    sources = [
        {"name": source, "path": str(folder / "data" / f"{source}.parquet")} for source in SOURCES.get(name, ["train"])
    ]
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    overrides = {
        "backend": "local",
        "rollout.engine": "hf",
        "weight_sync.lora": "merged",
        "run_dir": run_dir,
        "save_to": teacher if teaches else "null",
        "model.path": folder / ("hinted" if name in HINTED else "warm"),
        "data.train": json.dumps(sources),
        "data.eval": "null",
        "steps": STEPS,
        "seed": seed,
        # an override is read as YAML, which writes infinity as .inf
        "alg": json.dumps(alg).replace("Infinity", ".inf"),
        **SETTINGS.get(name, {}),
    }
    items = [f"{key}={value}" for key, value in overrides.items()]

    def work() -> None:
        prepared = prepare(
            load_recipe(RLConfig, str(ROOT / "configs" / f"{RECIPES.get(name, 'quickstart')}.yaml"), items)
        )

        async def body(context: RunContext) -> None:
            run = await start(prepared, context)
            log = run.log

            async def log_until_there(step: int, groups: list[Group], metrics: dict[str, float]) -> None:
                await log(step, groups, metrics)
                # of all drawn groups: dynamic sampling leaves the solved ones out of reward/mean
                if metrics["reward/mean_drawn"] >= GOAL and not teaches:
                    raise Reached

            run.log = log_until_there
            try:
                await main_rl.train(run)
            except Reached:
                await run.save()

        run_in_context(prepared.loaded.cfg, body)

    quietly(work)
    [run] = run_dir.iterdir()
    return read_row(name, seed, run)


def read_row(name: str, seed: int, run: Path) -> Row:
    """Return the row of a run, by the metrics of its steps."""
    metrics = read_metrics(run)
    rewards = [m["reward/mean_drawn"] for m in metrics]
    reached = next((i + 1 for i, r in enumerate(rewards) if r >= GOAL), None)
    # the teacher trains on after the goal, which does not count
    seconds = sum(m["time/step_s"] for m in metrics[:reached])
    first, best = rewards[0], max(rewards)
    return Row(name=name, seed=seed, start=first, best=best, rewards=rewards, steps=reached, seconds=seconds)


def learn_all(names: list[str], seeds: list[int], folder: Path) -> Iterator[Row]:
    """Run all algorithms, two at a time with a thread each: a model this small has no work for more."""
    if HINTED & {*names} and not (folder / "hinted").exists():
        warm_up_with_hints(folder)
    tasks = list(product(seeds, names))
    is_taught = any(MATRIX[name].get("teacher") for name in names)
    teaches = [is_taught and name == TEACHER for _, name in tasks]
    # not fork: torch's threads do not survive it
    spawn = get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(learn, [n for _, n in tasks], [s for s, _ in tasks], repeat(folder), teaches)


def list_cells(row: Row) -> list[str]:
    """Return the row of the table."""
    steps = "-" if row.steps is None else str(row.steps)
    return [row.name, str(row.seed), f"{row.start:.2f}", f"{row.best:.2f}", steps, f"{row.seconds:.0f}"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Does every algorithm learn?")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=list(MATRIX), default=list(MATRIX), metavar="NAME")
    parser.add_argument("--write", action="store_true", help="put the rows into the table of algs/README.md")
    parser.add_argument("--curves", type=Path, metavar="FILE", help="put the rewards per step of seed 0 into this JSON")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        warm_up(folder)
        for row in learn_all(args.only, args.seeds, folder):
            rows.append(row)
            print(f"| {' | '.join(list_cells(row))} |", flush=True)
            if args.curves and row.seed == 0:
                keep(args.curves, "quickstart", row.name, row.rewards)
    cells = [list_cells(row) for row in rows]
    print("\n" + make_table(HEAD, cells))
    if args.write:
        write_rows("learning matrix", HEAD, cells, order=list(MATRIX))
    return int(any(r.steps is None for r in rows))


if __name__ == "__main__":
    sys.exit(main())
