"""Seconds of one GRPO step beside TRL's GRPOTrainer and the raw ceilings: python -m tools.benchmarks.rl_vs_trl

The work: SmolLM2-135M-Instruct in bfloat16 (--dtype float32 for CPUs that multiply bfloat16 in software), 8 prompts x
8 samples of at most 32 tokens, one update, no KL, all cores in each phase. --work long: 4 prompts of about 500 tokens x
8 samples of at most 64.

    ours          main_rl.py on Ray, DeepSpeed and vLLM, with trainer.share_prefixes: auto
    ours, off     the same with trainer.share_prefixes: off
    TRL           1.16 in an environment of its own, with transformers' generation (its vLLM backend needs a GPU),
                  gradient checkpointing off (its default is on), fused AdamW, and the rows in a forward pass that are
                  fastest of those tried; on the prompts that our run drew, in their order
    ceilings      bare vLLM and bare torch on the same prompts and lengths (rl_ceiling.py); vLLM with its
                  defaults, and with each prompt computed once as in our engine

Each part runs in a process of its own; the order of all is reversed in every second round. The first step of each is
warm-up. It prints the median seconds of a step, lowest and highest, how noisy the machine was, and the reward and the
length of both sides, which show that the work is the same. Exit code 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from core.metrics import REWARD_MEAN, ROLLOUT_TOKENS_MEAN
from core.timing.phases import STEP, Phase, time_metric
from tools.benchmarks.beside_trl import SMOLLM2, make_smollm2, run_trl, say, trl_environment
from tools.benchmarks.processes import ROOT, print_row, read_metrics, run_for_json
from tools.benchmarks.rl_ceiling import CEILINGS
from tools.benchmarks.rl_work import LR, WORKLOADS, make_sums, read_phases, read_steps, run_ours, write_prompts


@dataclass(slots=True)
class Measured:
    """Seconds of the steps of one side, over all its runs, without warm-up."""

    seconds: list[float] = field(default_factory=list[float])
    rewards: list[float] = field(default_factory=list[float])
    lengths: list[float] = field(default_factory=list[float])
    phases: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def phase(self, name: str) -> float:
        return statistics.median(phases[name] for phases in self.phases)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.rl_vs_trl", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=SMOLLM2, help="made by python -m data_prep.smollm2 if it is missing")
    parser.add_argument("--data", type=Path, help="prompts in Parquet; sums of our own if not given")
    parser.add_argument("--trl-python", type=Path, help="a Python with trl; made under build/ if not given")
    parser.add_argument("--work", choices=WORKLOADS, default="short")
    parser.add_argument("--steps", type=int, default=5, help="of each run, the first is warm-up")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--trl-batch", type=int, nargs="+", default=[8, 16, 32], help="rows in a forward pass, to try")
    args = parser.parse_args()
    make_smollm2(args.model)
    args.data = args.data or make_sums(ROOT / "build" / "sums")
    trl_python = args.trl_python or trl_environment()
    with tempfile.TemporaryDirectory() as scratch:
        sides, batch = measure(args, trl_python, Path(scratch))
    print(make_table(sides, batch))
    missed = find_missed(sides, args.work)
    print("\n".join(missed) or "every goal is reached")
    return 1 if missed else 0


def measure(args: argparse.Namespace, trl_python: Path, scratch: Path) -> tuple[dict[str, Measured], int]:
    """Run everything; return what each side took, and TRL's rows in a forward pass."""
    work = WORKLOADS[args.work]
    data = write_prompts(args.data, work, scratch / "prompts.jsonl")
    sides = {name: Measured() for name in ("ours", "ours, off", "TRL", *CEILINGS)}
    runs: list[Path] = []  # the first of them draws the prompts of all other sides
    batch: int | None = None

    def ours(side: str) -> None:
        folder = Path(tempfile.mkdtemp(dir=scratch))
        share = "off" if side == "ours, off" else "auto"
        run = run_ours(str(ROOT / args.model), data, args.dtype, args.steps, work, share, folder)
        rows = read_metrics(run)[1:]
        sides[side].seconds += [row[time_metric(STEP)] for row in rows]
        sides[side].rewards += [row[REWARD_MEAN] for row in rows]
        sides[side].lengths += [row[ROLLOUT_TOKENS_MEAN] for row in rows]
        sides[side].phases.append(read_phases(run))
        runs.append(run)

    def trl() -> None:
        nonlocal batch
        task: dict[str, Any] = {
            "model": str((ROOT / args.model).absolute()),
            "dtype": args.dtype,
            "steps": prompts_of(runs[0], work.samples),
            "group_size": work.samples,
            "updates_per_step": 1,
            "new_tokens": work.new_tokens,
            "lr": LR,
            "threads": os.cpu_count(),
            "scratch": str(scratch),
        }
        batch = batch or fastest_batch(task, args.trl_batch, trl_python, scratch)
        done = run_trl("grpo", task | {"trl_batch": batch}, trl_python, scratch)
        sides["TRL"].seconds += done["seconds"][1:]
        sides["TRL"].rewards += done["rewards"][1:]
        sides["TRL"].lengths += done["lengths"][1:]

    def ceiling(what: str) -> None:
        command = [sys.executable, "-m", "tools.benchmarks.rl_ceiling", what, "--work", args.work]
        command += ["--run", str(runs[0]), "--model", str(ROOT / args.model), "--dtype", args.dtype]
        sides[what].seconds += run_for_json(command)[1:]

    # What is divided by each other runs next to each other: the machine's speed changes within minutes.
    parts: list[tuple[str, Callable[[], None]]] = [
        ("ours", lambda: ours("ours")),
        *((what, partial(ceiling, what)) for what in CEILINGS),
        ("ours, off", lambda: ours("ours, off")),
        ("TRL", trl),
    ]
    for number in range(args.rounds):
        # backwards every second time, so that a drift of the machine's speed cancels
        for name, part in parts[::-1] if number % 2 else parts:
            part()
            say(f"round {number + 1}, {name}: {sides[name].median:.2f} s (load {os.getloadavg()[0]:.1f})")
    assert batch is not None, "TRL has run"
    return sides, batch


def fastest_batch(task: dict[str, Any], batches: list[int], trl_python: Path, scratch: Path) -> int:
    """Return TRL's fastest number of rows in a forward pass, each tried on one step after a warm-up."""
    if len(batches) == 1:
        return batches[0]
    tried: dict[int, float] = {}
    for batch in batches:
        short = task | {"steps": task["steps"][:2], "trl_batch": batch}
        tried[batch] = run_trl("grpo", short, trl_python, scratch)["seconds"][-1]
        say(f"TRL with {batch} rows in a forward pass: {tried[batch]:.1f} s for a step")
    return min(tried, key=lambda b: tried[b])


def prompts_of(run: Path, samples: int) -> list[list[dict[str, Any]]]:
    """Return the prompts of our run with their answers, [step][prompt], in the columns that GRPOTrainer reads."""
    # samples of a group lie together, so every n-th line has the next prompt
    groups = [step[::samples] for step in read_steps(run)]
    return [[{"prompt": row["prompt"], "answer": row["answer"]} for row in step] for step in groups]


def make_table(sides: dict[str, Measured], trl_batch: int) -> str:
    """Return the table of seconds, rewards and lengths by side, with our phases and the noise of the machine."""
    lines = [f"{'side':<12}{'seconds of a step':>18}{'lowest':>9}{'highest':>9}{'reward':>9}{'tokens':>9}"]
    for name, side in sides.items():
        line = f"{name:<12}{side.median:>18.2f}{min(side.seconds):>9.2f}{max(side.seconds):>9.2f}"
        lines.append(line + "".join(f"{statistics.mean(x):>9.2f}" for x in (side.rewards, side.lengths) if x))
    ours = sides["ours"]
    shown = {name: ours.phase(name) for name in ours.phases[0] if name != STEP}
    lines.append("ours by phase: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in shown.items()))
    # how far one side differs from itself: no smaller ratio between two sides means anything
    spread = max(max(side.seconds) / min(side.seconds) for side in sides.values())
    counted = (
        f"{len(ours.seconds)} steps of each on {os.cpu_count()} cores; TRL with {trl_batch} rows in a forward pass"
    )
    return "\n".join([*lines, f"{counted}; slowest / fastest step of one side: at most {spread:.2f}"])


def find_missed(sides: dict[str, Measured], work: str) -> list[str]:
    """Print every ratio beside its goal; return a sentence for each that is missed."""
    same = sides["generate"].median + sides["train"].median
    once = sides["generate-once"].median + sides["train-once"].median
    ours, trl = sides["ours"], sides["TRL"].median / sides["ours"].median
    generation = ours.phase(Phase.WAIT_FOR_DATA)
    work_s = generation + ours.phase(Phase.TRAIN)
    at_most = {
        "ours, off / ceiling of the same layout": (sides["ours, off"].median / same, 1.15),
        "ours / ceiling with each prompt once": (ours.median / once, 1.3),
        "our generation / bare vLLM": (generation / sides["generate"].median, 1.15),
        "neither generation nor training / our step": (1 - work_s / ours.phase(STEP), 0.1),
    }
    goal = {"short": 2.2, "long": 4.0}[work]
    print(f"TRL / ours: {trl:.2f} (goal: at least {goal})")
    times = f"{ours.median:.1f} s, TRL {sides['TRL'].median:.1f} s: {trl:.2f} times as fast ({len(ours.seconds)} steps)"
    print_row(f"{times}; {ours.median / once:.2f} times bare vLLM and torch that compute each prompt once")
    strict = generation / sides["generate-once"].median
    print(f"our generation / bare vLLM with each prompt once: {strict:.2f} (no goal)")
    for name, (ratio, bound) in at_most.items():
        print(f"{name}: {ratio:.2f} (goal: at most {bound})")
    missed = [f"missed: {name}" for name, (ratio, bound) in at_most.items() if ratio > bound]
    return missed + (["missed: TRL / ours"] if trl < goal else [])


if __name__ == "__main__":
    sys.exit(main())
