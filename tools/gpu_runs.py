"""Runs and measurements of tools/gpu_check.py: the quickstart, the speed of training, and its memory.

Like tools/gpu_numbers.py they need torch, transformers, numpy and pydantic; the programs are those of every user.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from data_prep import arithmetic, tiny_model
from tools.benchmarks import memory, train_throughput
from tools.gpu_numbers import Bench, CheckFailed

ROOT = Path(__file__).resolve().parent.parent
GOAL = 0.9
"""Held-out reward that the quickstart reaches on every machine that has run it."""


def check_quickstart(bench: Bench) -> str:
    """Make model and data, warm the model up, and train it by reinforcement learning, with the quickstart's recipes."""
    import main_rl

    home = bench.folder / "quickstart"
    make_quickstart(home, small=bench.small)
    reinforced = {
        "backend": "local",
        "run_dir": home / "runs",
        "model.path": home / "sft",
        "data.train": home / "train.jsonl",
        "data.eval": home / "eval.jsonl",
        "rollout.engine": "hf",
    }
    if bench.small:
        reinforced |= {"steps": 2, "groups_per_step": 2, "group_size": 4, "updates_per_step": 1}
        reinforced |= {"trainer.warmup_updates": 1}
    done = main_rl.run(str(ROOT / "configs/quickstart.yaml"), write_overrides(reinforced))
    before, after = (metrics["reward/mean"] for metrics in (done.before, done.after))
    if not bench.small and not after >= GOAL:
        raise CheckFailed(f"the held-out reward went from {before:.3f} to {after:.3f}, and {GOAL} is expected")
    seconds, gap = done.metrics["time/step_s"], done.metrics["sync/probe_gap"]
    return f"held-out reward {before:.3f} to {after:.3f}, last step {seconds:.2f} s, probe gap {gap:.1e}"


def make_quickstart(home: Path, *, small: bool) -> None:
    """Make the quickstart's data in `home`, and its model, warmed up by supervised training, in `home`/sft."""
    import main_sl

    made = ["--train", "30", "--eval", "10", "--sft", "15"] if small else ["--train", "475", "--eval", "200"]
    # the sizes of make quickstart, for which GOAL is known to be reached
    made += [] if small else ["--sft", "600", "--copies", "24", "--wrong-share", "0.66"]
    tiny_model.main(["--out", str(home / "model"), "--hidden-size", "128", "--heads", "4"])
    arithmetic.main(["--out", str(home), "--jsonl", "--max", "9" if small else "49", "--padded", *made])
    supervised = {"backend": "local", "run_dir": home / "runs", "model.path": home / "model"}
    supervised |= {"data.train": home / "sft.jsonl", "save_to": home / "sft"}
    if small:
        supervised |= {"steps": 2, "rows_per_step": 8, "trainer.warmup_updates": 1}
    main_sl.run(str(ROOT / "configs/quickstart_sft.yaml"), write_overrides(supervised))


def write_overrides(changes: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in changes.items()]


def check_throughput(bench: Bench) -> str:
    """Measure updates of a model of Qwen3-0.6B's shape, with and without shared prefixes."""
    sizes = ["64"] if bench.small else ["4096", "16384"]
    small = ["--small", "--sequence", "64", "--updates", "1"] if bench.small else []
    rows = run_benchmark(train_throughput, ["--share", "--tokens", *sizes, *small])
    told = [
        f"{row['micro-batch']} tokens{' shared' if row['shared'] == 'yes' else ''}: {row['tokens/s']} tokens/s, "
        f"MFU {row['MFU']}, peak {row['peak-MiB']} MiB"
        for row in rows
    ]
    return "; ".join(told)


def check_head(bench: Bench) -> str:
    """Measure the memory of a step with all logits at once and in chunks; the losses must be equal."""
    small = ["--tokens", "2048", "--vocabulary", "20000", "--logits-mib", "32"]
    rows = run_benchmark(memory, small if bench.small else ["--tokens", "4096", "16384"])
    told = [f"{row['tokens']} tokens: {row['at once']} MiB at once, {row['in chunks']} in chunks" for row in rows]
    return "; ".join(told)


def run_benchmark(benchmark: ModuleType, options: list[str]) -> list[dict[str, str]]:
    """Run a program of tools/benchmarks/ and return the rows of its table. Raises CheckFailed where it fails."""
    command = [sys.executable, "-m", benchmark.__name__, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n")
    if done.returncode:
        # the last line of a traceback names the error
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["nothing was printed"]
        raise CheckFailed(f"{benchmark.__name__} ended with exit code {done.returncode}: {last[0]}")
    columns: tuple[str, ...] = benchmark.COLUMNS
    cells = [line.split() for line in done.stdout.splitlines()]
    # rows of the table begin with a number; other lines are titles and remarks
    return [dict(zip(columns, row, strict=True)) for row in cells if len(row) == len(columns) and row[0].isdigit()]
