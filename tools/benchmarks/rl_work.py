"""The work of tools/benchmarks/rl_vs_trl.py: two workloads, our run of one, and what is read of it."""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.timing.phases import REST, STEP, Phase, time_metric
from data_prep import arithmetic
from tools.benchmarks.processes import ROOT, read_metrics

LR = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts, samples and tokens of one step, with one update."""

    prompts: int
    samples: int
    """Samples of each prompt."""
    new_tokens: int
    """Largest number of tokens of a completion."""
    max_prompt: int
    solved: int
    """Solved sums before the question, which make its prompt long."""
    micro_batch_tokens: int = 2048


WORKLOADS = {
    "short": Workload(prompts=8, samples=8, new_tokens=32, max_prompt=128, solved=0),
    "long": Workload(prompts=4, samples=8, new_tokens=64, max_prompt=640, solved=38, micro_batch_tokens=6144),
}


def make_sums(folder: Path) -> Path:
    """Make the prompts of configs/smollm2_arithmetic.yaml, if they are missing; return the file to train on."""
    file = folder / "train.parquet"
    if not file.is_file():
        form = "Calculate {a} {op} {b}. Reply with the number only."
        arithmetic.main(["--out", str(folder), "--max", "20", "--train", "150", "--eval", "50", "--prompt-form", form])
    return file


def write_prompts(data: Path, work: Workload, file: Path) -> Path:
    """Write prompts of the workload's length as JSONL; prompts without solved sums are taken as they are."""
    if not work.solved:
        return data
    import pandas

    rows = pandas.read_parquet(data).to_dict("records")
    # the same prompts in every run of the benchmark
    draw = random.Random(0)
    with file.open("w") as out:
        for row in rows[:256]:
            numbers = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(work.solved)]
            solved = " ".join(f"{a} + {b} = {a + b}." for a, b in numbers)
            [message] = row["messages"]
            messages = [{"role": "user", "content": f"{solved} {message['content']}"}]
            out.write(json.dumps({**row, "messages": messages}) + "\n")
    return file


def run_ours(model: str, data: Path, dtype: str, steps: int, work: Workload, share: str, scratch: Path) -> Path:
    """Run main_rl.py on the workload; return its run folder."""
    recipe = scratch / "recipe.yaml"
    recipe.write_text(
        json.dumps(
            {
                "name": "rl-step",
                "steps": steps,
                "run_dir": str(scratch / "runs"),
                "groups_per_step": work.prompts,
                "group_size": work.samples,
                "model": {"path": str(Path(model).absolute()), "dtype": dtype},
                "alg": {"name": "grpo"},
                "data": {"train": str(data.absolute()), "max_prompt_tokens": work.max_prompt},
                "reward": {"function": "arithmetic"},
                "rollout": {"max_new_tokens": work.new_tokens},
                "trainer": {"micro_batch_tokens": work.micro_batch_tokens, "lr": LR, "share_prefixes": share},
            }
        )
    )
    command = [sys.executable, "main_rl.py", "--config", str(recipe)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    [run] = (scratch / "runs").iterdir()
    return run


def read_phases(run: Path) -> dict[str, float]:
    """Return the median seconds of each phase of a step, without the first step; `step` is the whole of it."""
    rows = read_metrics(run)[1:]
    # an unknown phase would silently be missing from the table
    known = {time_metric(name): str(name) for name in (*Phase, REST, STEP)}
    logged = {name for row in rows for name in row if re.fullmatch(r"time/\w+_s", name)}
    if unknown := sorted(logged - known.keys()):
        raise SystemExit(f"error: {run} logs {unknown[0]}, which is no phase of core/timing/phases.py")
    return {
        known[metric]: statistics.median(row.get(metric, 0.0) for row in rows) for metric in known if metric in logged
    }


def read_steps(run: Path) -> list[list[dict[str, Any]]]:
    """Return the samples of every step."""
    files = sorted((run / "samples").iterdir())
    return [[json.loads(line) for line in f.read_text().splitlines()] for f in files]
