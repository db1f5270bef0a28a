"""Cost of a sample beside bare vLLM, bare generate and TRL: python -m tools.benchmarks.sample_cost

The works: `quickstart`, the step of configs/quickstart.yaml (64 prompts x 16 samples of at most 8 tokens, 0.55M
parameters), and `long`, 256 prompts x 16 samples of 1 to 64 tokens of the same model. The sides:

    vllm           main_rl.py on Ray, DeepSpeed and vLLM, with the number of engines of `make quickstart`
    hf             the same with the engine hf, one
    local          backend: local with the engine hf, all in one process
    TRL            GRPOTrainer in an environment of its own, on the prompts of our first run
    bare vLLM      LLM.generate with n=16 on the same prompts; generation alone
    bare generate  transformers' generate on the same prompts; generation alone

Every side has a process of its own. The sides run in turns, in several rounds, because the speed of a machine drifts: a
ratio is the median over the rounds. A first table gives the seconds of a step without the first, and of generation, in
each round. A line gives the iterations of vLLM, from a run of its own. A second table gives CPU milliseconds of a
sample in each process, as the samples of a step grow. Both have one engine. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from core.timing.phases import STEP, Phase, time_metric
from tools.benchmarks import rl_ceiling
from tools.benchmarks.beside_trl import run_trl, say, trl_environment
from tools.benchmarks.processes import ROOT, print_row, read_metrics, run_for_json
from tools.benchmarks.rl_vs_trl import prompts_of
from tools.benchmarks.rl_work import Workload, read_steps
from tools.benchmarks.watched_run import PLACES, Watched, watch
from tools.gpu_day.runs import make_quickstart
from tools.placement import choose_overrides, count_devices

MODEL = ROOT / "build" / "sample_cost"
WORKS = {
    "quickstart": Workload(prompts=64, samples=16, new_tokens=8, max_prompt=32, solved=0),
    "long": Workload(prompts=256, samples=16, new_tokens=64, max_prompt=32, solved=0),
}
SIDES = ("vllm", "hf", "local")
BARE = ("bare vLLM", "bare generate")
GENERATION, OURS, LOCAL = "generation of vllm / bare vLLM", "vllm / TRL", "local / TRL"
GOALS = {GENERATION: 1.5, OURS: 1.0, LOCAL: 0.8}
"""Largest ratio of seconds, by its name."""

COUNTING_ENGINE = """
import json
from pathlib import Path

from vllm.v1.metrics.loggers import StatLoggerBase

from rollouts.engines.vllm import VllmEngine


class Iterations(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0):
        self.file = Path(__file__).with_name("iterations.txt").open("a", buffering=1)

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        if iteration_stats is not None:
            print(iteration_stats.num_generation_tokens, file=self.file)

    def log_engine_initialized(self):
        pass


class CountingEngine(VllmEngine):
    stat_loggers = (Iterations,)
"""
"""Engine that writes the number of sequences of every iteration into a file beside it."""


@dataclass(frozen=True, slots=True)
class Side:
    """Mean seconds of a side's steps without the first, which is warm-up; and of their generation, 0 if unknown."""

    step: float
    generation: float
    start: float = 0.0
    """Seconds from the command to the first step; 0 if unknown."""

    @classmethod
    def of(cls, seconds: list[float], generation: list[float] | None = None, *, start: float = 0.0) -> Side:
        return cls(statistics.mean(seconds[1:]), statistics.mean(generation[1:]) if generation else 0.0, start)


def main() -> int:
    """Measure as the command line says, print the tables, and return the exit code: 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.sample_cost", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--work", choices=WORKS, default="quickstart")
    parser.add_argument("--steps", type=int, default=41, help="the first is warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="*", default=[*SIDES, "TRL", *BARE], choices=[*SIDES, "TRL", *BARE])
    parser.add_argument("--growth", type=int, nargs="*", default=[64, 256, 1024, 4096, 16384], help="samples of a step")
    parser.add_argument("--trl-python", type=Path, help="a Python with trl; made under build/ if not given")
    parser.add_argument("--bare", nargs=2, metavar=("SIDE", "RUN"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    work = WORKS[args.work]
    if args.bare:
        side, run = args.bare
        print(json.dumps(measure_bare(side, Path(run), work)))
        return 0
    make_model()
    with tempfile.TemporaryDirectory() as scratch:
        rounds = measure_rounds(args, work, Path(scratch))
        if "vllm" in args.sides:
            print(describe_iterations(work, Path(scratch)), flush=True)
        if args.growth:
            print_growth(args.growth, work, Path(scratch))
    # the row has a number of every ratio
    if list_ratios(rounds).keys() == GOALS.keys():
        print_row(describe_rounds(rounds))
    missed = find_missed(rounds)
    print("\n".join(missed) or "every goal of a measured side is reached")
    return 1 if missed else 0


def make_model() -> None:
    """Make the quickstart's model and data, if they are missing."""
    if not (MODEL / "sft" / "config.json").is_file():
        say(f"making the quickstart's model in {MODEL.relative_to(ROOT)}")
        make_quickstart(MODEL, small=False)


def measure_rounds(args: argparse.Namespace, work: Workload, scratch: Path) -> list[dict[str, Side]]:
    """Run every side once in each round, and print its line. Our first run draws the prompts of the other sides."""
    rounds: list[dict[str, Side]] = []
    runs: list[Path] = []
    print(f"{args.work}: {work.prompts} x {work.samples} samples, {args.steps - 1} steps on {os.cpu_count()} cores")
    print(f"{'round':>5}  {'side':<15}{'s/step':>9}{'generation':>12}")
    for number in range(args.rounds):
        rounds.append({})
        for name in args.sides:
            side = rounds[-1][name] = measure_side(name, args, work, scratch, runs)
            generation = f"{side.generation:>12.3f}" if side.generation else ""
            print(f"{number:>5}  {name:<15}{side.step:>9.3f}{generation}", flush=True)
    return rounds


def measure_side(name: str, args: argparse.Namespace, work: Workload, scratch: Path, runs: list[Path]) -> Side:
    """Run a side. runs: the folders of our runs so far, to which a run of ours is added."""
    if name in SIDES:
        run, watched = run_ours(work, args.steps, scratch, *list_overrides(name))
        runs.append(run)
        rows = read_metrics(run)
        seconds, generation = ([row[time_metric(key)] for row in rows] for key in (STEP, Phase.WAIT_FOR_DATA))
        return Side.of(seconds, generation, start=watched.first_end - seconds[0])
    if not runs:
        raise SystemExit(f"error: {name} needs the prompts of one of our runs before it in --sides: {list(SIDES)}")
    if name == "TRL":
        return Side.of(measure_trl(args, work, runs[0], scratch))
    command = [sys.executable, "-m", "tools.benchmarks.sample_cost", "--work", args.work]
    seconds = run_for_json([*command, "--bare", name, str(runs[0])])
    return Side.of(seconds, seconds)


def list_overrides(side: str) -> list[str]:
    """Return the overrides of one of our sides, for this machine."""
    if side == "vllm":
        return list(choose_overrides(*count_devices()))
    return ["rollout.engine=hf"] if side == "hf" else ["rollout.engine=hf", "backend=local"]


def run_ours(work: Workload, steps: int, scratch: Path, *overrides: str) -> tuple[Path, Watched]:
    """Run main_rl.py; return the run folder, and what was seen of the run."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    recipe: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    recipe |= {"steps": steps, "groups_per_step": work.prompts, "group_size": work.samples, "run_dir": str(folder)}
    recipe["model"]["path"] = str(MODEL / "sft")
    recipe["data"] = {"train": str(MODEL / "train.jsonl"), "max_prompt_tokens": work.max_prompt}
    recipe["rollout"]["max_new_tokens"] = work.new_tokens
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "main_rl.py", "--config", str(file), "display=quiet", *overrides]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        watched = watch(process, folder, steps)
    if process.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with exit code {process.returncode}")
    [metrics] = folder.glob("*/metrics.jsonl")
    return metrics.parent, watched


def measure_trl(args: argparse.Namespace, work: Workload, run: Path, scratch: Path) -> list[float]:
    """Return the seconds of TRL's steps, each one generation and the recipe's updates."""
    recipe = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    updates = recipe["updates_per_step"]
    task: dict[str, Any] = {
        "model": str(MODEL / "sft"),
        "dtype": "float32",
        "steps": prompts_of(run, work.samples),
        "group_size": work.samples,
        "new_tokens": work.new_tokens,
        "updates_per_step": updates,
        "lr": recipe["trainer"]["lr"],
        "threads": os.cpu_count(),
        "scratch": str(scratch),
        "trl_batch": work.prompts * work.samples // updates,
    }
    return run_trl("grpo", task, args.trl_python or trl_environment(), scratch)["seconds"]


def measure_bare(side: str, run: Path, work: Workload) -> list[float]:
    """Return the seconds of generation for the prompts of every step, without a framework."""
    model = str(MODEL / "sft")
    if side == "bare vLLM":
        return rl_ceiling.generate(model, "float32", run, work, once=True)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
    lm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    seconds: list[float] = []
    for step in read_steps(run):
        start = time.perf_counter()
        chats = [row["prompt"] for row in step[:: work.samples]]
        asked = {"add_generation_prompt": True, "return_dict": True, "padding": True, "return_tensors": "pt"}
        inputs = tokenizer.apply_chat_template(chats, **asked)
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        lm.generate(**inputs, **sampling, max_new_tokens=work.new_tokens, num_return_sequences=work.samples)
        seconds.append(time.perf_counter() - start)
    return seconds


def describe_iterations(work: Workload, scratch: Path) -> str:
    """Run some steps with an engine that counts; return a line on the iterations of vLLM after the first step."""
    steps = 6
    engine = scratch / "counting_engine.py"
    engine.write_text(COUNTING_ENGINE)
    run, _ = run_ours(work, steps, scratch, f"rollout.engine={engine}")
    sizes = [int(line) for line in engine.with_name("iterations.txt").read_text().split()]
    tokens = [sum(row["new_tokens"] for row in step) for step in read_steps(run)]
    seen = tokens[0]
    while seen > 0:  # the first step is warm-up
        seen -= sizes.pop(0)
    mean = statistics.mean(sizes)
    small = sum(size < mean / 2 for size in sizes) / len(sizes)
    return (
        f"vLLM: {work.prompts * work.samples} requests and {len(sizes) / (steps - 1):.1f} forward passes a step; "
        f"sequences of a pass: mean {mean:.0f}, median {statistics.median(sizes):.0f}; "
        f"{small:.0%} of the passes have less than half of the mean"
    )


def print_growth(growth: list[int], work: Workload, scratch: Path) -> None:
    """Print CPU milliseconds of a sample by process, for each number of samples of a step."""
    print(f"{'samples':>8}{'s/step':>9}" + "".join(f"{place:>14}" for place in PLACES) + "   CPU ms a sample")
    for samples in growth:
        prompts = samples // work.samples
        # more steps where each is short, because the clock of CPU seconds ticks in hundredths
        steps = 2 + max(2, min(20, 8192 // samples))
        sized = Workload(
            prompts=prompts, samples=work.samples, new_tokens=work.new_tokens, max_prompt=work.max_prompt, solved=0
        )
        few = ["updates_per_step=4"] if prompts < 8 else []
        run, watched = run_ours(sized, steps, scratch, *few)
        cpu = watched.count_cpu()
        each = [1000 * cpu.get(place, 0.0) / (samples * (steps - 2)) for place in PLACES]
        seconds = statistics.median(row[time_metric(STEP)] for row in read_metrics(run)[1:])
        print(f"{samples:>8}{seconds:>9.2f}" + "".join(f"{ms:>14.3f}" for ms in each), flush=True)


def list_ratios(rounds: list[dict[str, Side]]) -> dict[str, list[float]]:
    """Return the ratios of GOALS whose sides were measured, each with its value in every round."""

    def divide(side: Callable[[Side], float], name: str, base: str) -> list[float]:
        measured = {name, base} <= rounds[0].keys()
        return [side(sides[name]) / sides[base].step for sides in rounds] if measured else []

    found = {
        GENERATION: divide(lambda side: side.generation, "vllm", "bare vLLM"),
        OURS: divide(lambda side: side.step, "vllm", "TRL"),
        LOCAL: divide(lambda side: side.step, "local", "TRL"),
    }
    return {name: each for name, each in found.items() if each}


def describe_rounds(rounds: list[dict[str, Side]]) -> str:
    """Return the medians over the rounds, of seconds and of ratios."""

    def median(number: Callable[[dict[str, Side]], float]) -> float:
        return statistics.median(map(number, rounds))

    ratios = {name: statistics.median(each) for name, each in list_ratios(rounds).items()}
    engines = " and ".join(["vLLM", *list_overrides("vllm")])
    return (
        f"{median(lambda r: r['vllm'].step):.2f} s ({ratios[OURS]:.2f} of TRL's) on Ray with {engines}, "
        f"{median(lambda r: r['local'].step):.2f} s ({ratios[LOCAL]:.2f} of TRL's) with `backend: local`, "
        f"TRL {median(lambda r: r['TRL'].step):.2f} s; generation {median(lambda r: r['vllm'].generation):.2f} s, "
        f"{ratios[GENERATION]:.2f} times bare vLLM's; start {median(lambda r: r['vllm'].start):.0f} s"
    )


def find_missed(rounds: list[dict[str, Side]]) -> list[str]:
    """Print the median of every ratio beside its goal; return a sentence for each that is missed."""
    ratios = list_ratios(rounds)
    for name, each in ratios.items():
        listed = ", ".join(f"{ratio:.2f}" for ratio in sorted(each))
        print(f"{name}: median {statistics.median(each):.2f} of {listed} (goal: at most {GOALS[name]})")
    return [f"missed: {name}" for name, each in ratios.items() if statistics.median(each) > GOALS[name]]


if __name__ == "__main__":
    sys.exit(main())
