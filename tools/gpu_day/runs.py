"""Rows of a GPU day that start programs of this repository: the tests marked gpu, the quickstart, and a benchmark."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from data_prep import arithmetic, tiny_model
from tools.benchmarks import memory
from tools.gpu_day.bench import Bench
from tools.gpu_day.rows import ROOT, CheckFailed, Numbers

GOAL = 0.9
"""Held-out reward that the quickstart reaches on every machine that has run it."""
SAME_AS_ROWS = "unit_tests/trainers/test_gpu.py::test_a_gpu_computes_what_a_cpu_computes"
"""Test that runs rows of this day once more."""
SMALL_STEPS = {"steps": 2, "groups_per_step": 2, "group_size": 4, "updates_per_step": 1, "trainer.warmup_updates": 1}


def check_tests(bench: Bench) -> Numbers:
    """Run the tests marked gpu. Only their files are collected, since others may need more packages."""
    files = [p for p in sorted(ROOT.glob("unit_tests/**/test_*.py")) if "pytest.mark.gpu" in p.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--deselect", SAME_AS_ROWS, "-p", "no:cacheprovider"]
    said = run_program([*command, *map(str, files)])
    counts = {state: int(n) for n, state in re.findall(r"(\d+) (passed|skipped)", said.splitlines()[-1])}
    if not bench.small and not counts.get("passed"):
        raise CheckFailed(f"no test ran: {said.splitlines()[-1]}")
    return {"files": len(files), **counts}


def check_quickstart(bench: Bench) -> Numbers:
    """Make model and data, warm the model up, and train it by reinforcement learning, with the quickstart's recipes."""
    home = bench.folder / "quickstart"
    make_quickstart(home, small=bench.small)
    return reinforce(home, {"backend": "local", "rollout.engine": "hf"}, small=bench.small)


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


def reinforce(home: Path, changes: dict[str, Any], *, small: bool) -> Numbers:
    """Run the quickstart's reinforcement learning with changed keys. Raises CheckFailed below GOAL."""
    import main_rl

    keys = {"run_dir": home / "runs", "model.path": home / "sft"}
    keys |= {"data.train": home / "train.jsonl", "data.eval": home / "eval.jsonl"}
    keys |= (SMALL_STEPS if small else {}) | changes
    done = main_rl.run(str(ROOT / "configs/quickstart.yaml"), write_overrides(keys))
    before, after = (metrics["reward/mean"] for metrics in (done.before, done.after))
    if not small and not after >= GOAL:
        raise CheckFailed(f"the held-out reward went from {before:.3f} to {after:.3f}, and {GOAL} is expected")
    found: Numbers = {"held-out reward before": before, "after": after}
    return found | {"last step, s": done.metrics["time/step_s"], "probe, nats apart": done.metrics["sync/probe_gap"]}


def write_overrides(changes: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in changes.items()]


def check_head(bench: Bench) -> Numbers:
    """Measure the memory of a step with all logits at once and in chunks; the losses must be equal."""
    small = ["--tokens", "2048", "--vocabulary", "20000", "--logits-mib", "32"]
    said = run_program([sys.executable, "-m", memory.__name__, *(small if bench.small else ["--tokens", "16384"])])
    cells = [line.split() for line in said.splitlines()]
    # the row of the table begins with a number; other lines are titles and remarks
    [row] = [row for row in cells if len(row) == len(memory.COLUMNS) and row[0].isdigit()]
    found = dict(zip(memory.COLUMNS, map(float, row), strict=True))
    return {"tokens": found["tokens"], "at once, MiB": found["at once"], "in chunks, MiB": found["in chunks"]}


def run_program(command: list[str]) -> str:
    """Run a program and return its output. Raises CheckFailed where it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n")
    if done.returncode:
        # the last line of a traceback, or of pytest, names the error
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["nothing was printed"]
        raise CheckFailed(f"{command[2]} ended with exit code {done.returncode}: {last[0]}")
    return done.stdout.strip()
