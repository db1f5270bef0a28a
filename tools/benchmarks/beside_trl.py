"""Shared parts of the supervised benchmarks beside TRL: two sides in separate processes, in turns, on the same rows.

    tools/benchmarks/sft_vs_trl.py    SFTTrainer
    tools/benchmarks/dpo_vs_trl.py    DPOTrainer

A benchmark makes a task, which both sides read as JSON, and gives the code of our side; TRL's side is a script for the
Python of an environment with TRL. Both print what `Measured` holds.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from tools.benchmarks.processes import ROOT, print_row, run_for_json

SMOLLM2 = "models/smollm2"
TRL = ["trl==1.16.0", "transformers==5.19.0", "math-verify==0.9.0"]
TORCH_CPU = "torch==2.13.0+cpu"
TORCH_INDEX = ["--index-url", "https://download.pytorch.org/whl/cpu"]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Comparison of one of our trainers with TRL's."""

    module: str
    """Our side, as `python -m` takes it, with --ours TASK."""
    trl_side: str
    """TRL's side: the first argument of trl_side.py."""
    goal: float
    """Times TRL's trained tokens per second."""
    settings: tuple[str, ...]
    """Names of settings of TRL's that are true or false, to be tried."""
    count_trained: Callable[[Row], int]
    """Tokens of a row that are trained on."""
    count_tokens: Callable[[Row], int]
    make_updates: Callable[[argparse.Namespace], list[list[Row]]]
    """Return the rows of every update, the first for warm-up, in the order in which TRL takes them."""
    train: Callable[[dict[str, Any]], Iterator[float]]
    """Yield once when the trainer is ready, then the loss after every update."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one process's run over the task."""

    seconds: list[float]
    """One entry per update, warm-up included."""
    cpu_seconds: list[float]
    losses: list[float]
    peak_mib: float


def run_benchmark(benchmark: Benchmark, parser: argparse.ArgumentParser) -> int:
    """Compare both sides; return the exit code. parser: with the options of this benchmark alone."""
    parser.add_argument("--model", default=SMOLLM2, help="made by python -m data_prep.smollm2 if it is missing")
    parser.add_argument("--trl-python", type=Path, help="a Python with trl; made under build/ if not given")
    parser.add_argument("--rows", type=int, default=32, help="in an update")
    parser.add_argument("--updates", type=int, default=8, help="that are timed in each run")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-batch", type=int, nargs="+", default=[1, 2, 4], help="rows in a forward pass, to try")
    parser.add_argument("--ours", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ours:
        print(json.dumps(_run_ours(benchmark, json.loads(args.ours.read_text()))))
        return 0
    make_smollm2(args.model)
    with tempfile.TemporaryDirectory() as scratch:
        return _compare(benchmark, args, args.trl_python or trl_environment(), Path(scratch))


def _compare(benchmark: Benchmark, args: argparse.Namespace, trl_python: Path, scratch: Path) -> int:
    task = {
        "model": str((ROOT / args.model).absolute()),
        "updates": benchmark.make_updates(args),
        "threads": args.threads,
        "lr": 1e-5,
        "micro_batch_tokens": args.micro_batch_tokens,
        "scratch": str(scratch),
    }
    task |= _find_best_for_trl(benchmark, task, args.trl_batch, trl_python, scratch)
    runs: dict[str, list[Measured]] = {"ours": [], "trl": []}
    for pair in range(args.pairs):
        # in turns, so that a machine whose speed drifts favours neither side
        for who in ("ours", "trl") if pair % 2 == 0 else ("trl", "ours"):
            runs[who].append(_run(benchmark, who, task, trl_python, scratch))
            say(f"pair {pair + 1}, {who}: {_speed(benchmark, task, runs[who][-1].seconds):.1f} tokens/s")
    return _report(benchmark, task, runs)


def _find_best_for_trl(
    benchmark: Benchmark, task: dict[str, Any], batches: list[int], trl_python: Path, scratch: Path
) -> dict[str, Any]:
    """Return the fastest of TRL's settings over one update after a warm-up."""
    # one update to warm up, and one that is timed
    short = task | {"updates": task["updates"][:2]}
    rows = len(task["updates"][0])
    choices = [[(name, False), (name, True)] for name in benchmark.settings]
    settings = [{"trl_batch": b, **dict(rest)} for b in batches if rows % b == 0 for rest in product(*choices)]
    taken: list[float] = []
    for setting in settings:
        # CPU seconds, which other work on the machine disturbs less than the wall clock
        taken.append(_run(benchmark, "trl", short | setting, trl_python, scratch).cpu_seconds[-1])
        say(f"TRL tries {setting}: {taken[-1]:.1f} CPU seconds for an update")
    return settings[taken.index(min(taken))]


def _run(benchmark: Benchmark, who: str, task: dict[str, Any], trl_python: Path, scratch: Path) -> Measured:
    if who == "trl":
        return Measured(**run_trl(benchmark.trl_side, task, trl_python, scratch))
    file = scratch / "task.json"
    file.write_text(json.dumps(task))
    return Measured(**run_for_json([sys.executable, "-m", benchmark.module, "--ours", str(file)]))


def run_trl(
    kind: str, task: dict[str, Any], trl_python: Path, scratch: Path, *, program: str = "trl_side.py"
) -> dict[str, Any]:
    """Run trl_side.py with the Python of another environment, and return what it prints."""
    file = scratch / "task.json"
    file.write_text(json.dumps(task))
    script = ROOT / "tools" / "benchmarks" / program
    # in the scratch folder: nothing of ours is to be imported there
    return run_for_json([str(trl_python.absolute()), str(script), kind, str(file)], cwd=scratch)


def cut_updates(rows: list[Row], args: argparse.Namespace, length: Callable[[Row], int]) -> list[list[Row]]:
    """Return the rows of every update, the longest first: in their order until all are used, then again."""
    drawn = [rows[n % len(rows)] for n in range(args.rows * (1 + args.updates))]
    cut = [drawn[n : n + args.rows] for n in range(0, len(drawn), args.rows)]
    # TRL pads to the longest row of a forward pass, so sorted rows are its best case
    return [sorted(update, key=lambda row: -length(row)) for update in cut]


def _run_ours(benchmark: Benchmark, task: dict[str, Any]) -> dict[str, Any]:
    """Measure every update of our side, in this process."""
    losses: list[float] = []
    training = benchmark.train(task)
    # up to the first yield: loading the model is not timed
    next(training)
    ends = [(time.perf_counter(), time.process_time())]
    for loss in training:
        losses.append(loss)
        ends.append((time.perf_counter(), time.process_time()))
    spans = list(pairwise(ends))
    return {
        "seconds": [after[0] - before[0] for before, after in spans],
        "cpu_seconds": [after[1] - before[1] for before, after in spans],
        "losses": losses,
        # ru_maxrss is in KiB on Linux
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _speed(benchmark: Benchmark, task: dict[str, Any], seconds: list[float]) -> float:
    """Return the trained tokens per second after the warm-up."""
    # the first update of both sides is warm-up
    trained = sum(benchmark.count_trained(row) for update in task["updates"][1:] for row in update)
    return trained / sum(seconds[1:])


def _report(benchmark: Benchmark, task: dict[str, Any], runs: dict[str, list[Measured]]) -> int:
    wall = {who: [_speed(benchmark, task, m.seconds) for m in done] for who, done in runs.items()}
    cpu = {who: [_speed(benchmark, task, m.cpu_seconds) for m in done] for who, done in runs.items()}
    peak = {who: max(m.peak_mib for m in done) for who, done in runs.items()}
    lengths = sorted(benchmark.count_tokens(row) for update in task["updates"] for row in update)
    others = "".join(f", {name}={task[name]}" for name in benchmark.settings)
    spread = f"{lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]})"
    print(
        f"\n{len(task['updates'][0])} rows of {spread} in an update, {len(task['updates']) - 1} updates x "
        f"{len(wall['ours'])} runs, {task['threads']} threads; ours with {task['micro_batch_tokens']} tokens in a "
        f"forward pass, TRL with {task['trl_batch']} rows{others}\n"
    )
    print(f"{'trained tokens/s':<26}{'ours':>10}{'TRL':>10}{'ratio':>8}   lowest to highest of ours, of TRL")
    ratios: dict[str, float] = {}
    for name, numbers in (("wall clock, median", wall), ("CPU time, median", cpu)):
        ours, theirs = statistics.median(numbers["ours"]), statistics.median(numbers["trl"])
        ratios[name] = ours / theirs
        spread = ", ".join(f"{min(n):.1f} to {max(n):.1f}" for n in (numbers["ours"], numbers["trl"]))
        print(f"{name:<26}{ours:>10.1f}{theirs:>10.1f}{ours / theirs:>8.2f}   {spread}")
    print(f"{'peak memory, MiB':<26}{peak['ours']:>10.0f}{peak['trl']:>10.0f}{peak['ours'] / peak['trl']:>8.2f}")
    pairs = list(zip(runs["ours"][0].losses, runs["trl"][0].losses, strict=True))
    print("losses, ours and TRL's: " + ", ".join(f"{a:.4f} {b:.4f}" for a, b in pairs))
    # the first loss is of equal weights; later ones drift with the order of sums
    same = abs(pairs[0][0] - pairs[0][1]) < 1e-3 and all(abs(a - b) < 1e-2 for a, b in pairs)
    reached = ratios["wall clock, median"] >= benchmark.goal and same
    said = "reached" if reached else "missed"
    print(f"goal, {benchmark.goal} times TRL with the same losses: {said}")
    memory, runs_each = peak["ours"] / peak["trl"], len(wall["ours"])
    faster = f"{ratios['wall clock, median']:.2f} times the tokens per second"
    print_row(f"{faster}, {memory:.2f} of the memory ({runs_each} runs of each)")
    return 0 if reached else 1


def make_smollm2(model: str) -> None:
    """Make the default model if it is missing; a model of the user's is his to make."""
    if model == SMOLLM2 and not (ROOT / model).is_dir():
        say(f"making {model}: python -m data_prep.smollm2 --out {model}")
        subprocess.run([sys.executable, "-m", "data_prep.smollm2", "--out", model], cwd=ROOT, check=True)


def trl_environment() -> Path:
    """Return the Python of build/trl; make the environment if it is missing."""
    python = ROOT / "build" / "trl" / "bin" / "python"
    if not (python.parent.parent / "made").is_file():
        say("making an environment with TRL in build/trl")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(python.parent.parent)], check=True)
        install = [str(python), "-m", "pip", "install", "-q"]
        configured = subprocess.run([*install, TORCH_CPU], capture_output=True, check=False)
        if configured.returncode:  # PyPI itself has no CPU build
            subprocess.run([*install, *TORCH_INDEX, TORCH_CPU], check=True)
        subprocess.run([*install, *TRL], check=True)
        # written last, so an installation that was stopped is made anew
        (python.parent.parent / "made").touch()
    return python


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
