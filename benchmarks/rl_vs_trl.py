"""Seconds of one GRPO step beside TRL's GRPOTrainer, on the same prompts: python -m benchmarks.rl_vs_trl

The work is that of benchmarks/rl_step.py: SmolLM2-135M-Instruct in bfloat16, 8 prompts x 8 samples of at most 32
tokens, one update, no KL. Ours is main_rl.py on Ray, DeepSpeed and vLLM. TRL's is 1.16 in an environment of its own,
with transformers' generation (its vLLM backend needs a GPU), gradient checkpointing off (its default is on), fused
AdamW and the rows in a forward pass that are fastest of those tried. It trains on the prompts that our run drew, in
their order.

Both run in processes of their own, ours first and TRL's first alternately; the first step of each run is warm-up. It
prints the median seconds of a step, lowest and highest, and the reward and length of both sides, which show that the
work is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import rl_step
from benchmarks.sft_vs_trl import ROOT, say, trl_environment
from core.metrics import REWARD_MEAN, ROLLOUT_TOKENS_MEAN
from core.phases import STEP, time_metric


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rl_vs_trl", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="models/smollm2", help="made by python -m data_prep.smollm2")
    parser.add_argument("--data", default="data/smollm2_arithmetic/train.parquet")
    parser.add_argument("--trl-python", type=Path, help="a Python with trl; made under build/ if not given")
    parser.add_argument("--steps", type=int, default=5, help="of each run, the first is warm-up")
    parser.add_argument("--pairs", type=int, default=2, help="runs of each side")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--trl-batch", type=int, nargs="+", default=[8, 16, 32], help="rows in a forward pass, to try")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        compare(args, args.trl_python or trl_environment(), Path(scratch))


def compare(args: argparse.Namespace, trl_python: Path, scratch: Path) -> None:
    def ours() -> tuple[Path, dict[str, Any]]:
        folder = Path(tempfile.mkdtemp(dir=scratch))
        run = rl_step.our_run(args.model, args.data, args.dtype, args.steps, folder)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return run, {
            "seconds": [row[time_metric(STEP)] for row in rows],
            "rewards": [row[REWARD_MEAN] for row in rows],
            "lengths": [row[ROLLOUT_TOKENS_MEAN] for row in rows],
        }

    first_run, first = ours()
    task = {
        "model": str(Path(args.model).absolute()),
        "dtype": args.dtype,
        "steps": prompts_of(first_run),
        "group_size": rl_step.SAMPLES,
        "new_tokens": rl_step.NEW_TOKENS,
        "lr": rl_step.LR,
        "threads": os.cpu_count(),
        "scratch": str(scratch),
    }
    tried = {}
    for batch in args.trl_batch:
        short = task | {"steps": task["steps"][:2], "trl_batch": batch}
        tried[batch] = trl_run(short, trl_python, scratch)["seconds"][-1]
        say(f"TRL with {batch} rows in a forward pass: {tried[batch]:.1f} s for a step")
    task["trl_batch"] = min(tried, key=lambda b: tried[b])
    runs = {"ours": [first], "TRL": [trl_run(task, trl_python, scratch)]}
    for pair in range(1, args.pairs):
        for who in ("ours", "TRL") if pair % 2 == 0 else ("TRL", "ours"):
            runs[who].append(ours()[1] if who == "ours" else trl_run(task, trl_python, scratch))
    print(make_table(runs, task["trl_batch"]))


def prompts_of(run: Path) -> list[list[dict[str, Any]]]:
    """Return the prompts of our run with their answers, [step][prompt], in the columns that GRPOTrainer reads."""
    groups = [step[:: rl_step.SAMPLES] for step in rl_step.steps_of(run)]
    return [[{"prompt": row["prompt"], "answer": row["answer"]} for row in step] for step in groups]


def trl_run(task: dict[str, Any], trl_python: Path, scratch: Path) -> dict[str, Any]:
    file = scratch / "task.json"
    file.write_text(json.dumps(task))
    command = [str(trl_python.absolute()), str(ROOT / "benchmarks/trl_grpo.py"), str(file)]
    out = subprocess.run(
        command, cwd=scratch, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout
    return json.loads(out.splitlines()[-1])


def make_table(runs: dict[str, list[dict[str, Any]]], trl_batch: int) -> str:
    """Return one line for each side; `runs` has the seconds, rewards and lengths of each run's steps."""
    lines = [f"{'side':<6}{'seconds of a step':>18}{'lowest':>9}{'highest':>9}{'reward':>9}{'tokens':>9}"]
    medians = {}
    for who, done in runs.items():
        seconds = [s for run in done for s in run["seconds"][1:]]
        medians[who] = statistics.median(seconds)
        reward, length = (statistics.mean(x for run in done for x in run[name]) for name in ("rewards", "lengths"))
        lines.append(
            f"{who:<6}{medians[who]:>18.2f}{min(seconds):>9.2f}{max(seconds):>9.2f}{reward:>9.2f}{length:>9.1f}"
        )
    counted = sum(len(run["seconds"]) - 1 for run in runs["ours"])
    lines.append(f"{counted} steps of each on {os.cpu_count()} cores; TRL with {trl_batch} rows in a forward pass")
    return "\n".join([*lines, f"TRL's step / our step: {medians['TRL'] / medians['ours']:.2f}"])


if __name__ == "__main__":
    main()
