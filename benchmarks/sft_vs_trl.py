"""Supervised learning beside TRL's SFTTrainer, on the same rows: python -m benchmarks.sft_vs_trl --data gsm8k.jsonl

The work: SmolLM2-135M-Instruct in float32, GSM8K questions and worked answers with their spread of lengths, loss on
the answers only, the same rows in every update, AdamW with clipping, no activation checkpointing. Ours is the
reference trainer (backend: local): planning, packing and `step`, as main_sl.py calls them. TRL's is 1.16 in an
environment of its own, at its best known for a CPU: the rows of an update sorted by length, so that it pads little
(as good as its group_by_length can be), fused AdamW, gradient checkpointing off (its default is on), and the number of
rows in a forward pass that is fastest of those tried. Its packing and padding_free are made for flash attention,
which no CPU has; padding_free is tried all the same. Liger's kernels want a GPU.

Both run in processes of their own, in turns, ours first and TRL's first alternately; the first update of each is
warm-up. It prints trained tokens per second (of the wall clock, and of the CPU time the process got, which is steadier
on a machine with other work), and the peak of resident memory. Exit code 1 where ours is not 1.3 times as fast in no
more memory, or the losses differ.

Without --trl-python the environment is made under build/, from PyPI and where that has no CPU build of torch, from
PyTorch's index.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
GOAL = 1.3
TRL = ["trl==1.16.0", "transformers==5.19.0"]
TORCH_CPU = "torch==2.13.0+cpu"
TORCH_INDEX = ["--index-url", "https://download.pytorch.org/whl/cpu"]
LR = 1e-5


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one process's run over the task."""

    seconds: list[float]
    """One entry per update, warm-up included."""
    cpu_seconds: list[float]
    losses: list[float]
    peak_mib: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sft_vs_trl", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="models/smollm2", help="made by python -m data_prep.smollm2")
    parser.add_argument("--data", type=Path, default=ROOT / "unit_tests/gsm8k_rows.jsonl", help="JSONL as GSM8K has it")
    parser.add_argument("--trl-python", type=Path, help="a Python with trl; made under build/ if not given")
    parser.add_argument("--rows", type=int, default=32, help="in an update")
    parser.add_argument("--updates", type=int, default=8, help="that are timed in each run")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch-tokens", type=int, default=512, help="ours")
    parser.add_argument("--trl-batch", type=int, nargs="+", default=[1, 2, 4], help="rows in a forward pass, to try")
    parser.add_argument("--ours", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ours:
        print(json.dumps(our_run(json.loads(args.ours.read_text()))))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        return compare(args, args.trl_python or trl_environment(), Path(scratch))


def compare(args: argparse.Namespace, trl_python: Path, scratch: Path) -> int:
    task = {
        "model": str(Path(args.model).absolute()),
        "updates": updates_of(args.data, args.model, args.rows, 1 + args.updates),
        "threads": args.threads,
        "lr": LR,
        "micro_batch_tokens": args.micro_batch_tokens,
        "scratch": str(scratch),
    }
    task |= best_for_trl(task, args.trl_batch, trl_python, scratch)
    runs: dict[str, list[Measured]] = {"ours": [], "trl": []}
    for pair in range(args.pairs):
        for who in ("ours", "trl") if pair % 2 == 0 else ("trl", "ours"):
            runs[who].append(run(who, task, trl_python, scratch))
            say(f"pair {pair + 1}, {who}: {speed(task, runs[who][-1].seconds):.1f} tokens/s")
    return report(task, runs)


def updates_of(data: Path, model: str, rows: int, updates: int) -> list[list[dict[str, Any]]]:
    """Return ids and mask, [update][row]: drawn at random without replacement until all rows are used, then again."""
    from data_feeds.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer(model, "chat")
    given = [json.loads(line) for line in data.read_text().splitlines() if line.strip()]
    random.Random(0).shuffle(given)

    def encoded(row: dict[str, str]) -> dict[str, Any]:
        turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        ids, mask = tokenizer.mask_turns(turns)
        return {"ids": ids, "mask": [False, *mask[1:]]}

    chosen = [encoded(given[n % len(given)]) for n in range(rows * updates)]
    cut = [chosen[n * rows : (n + 1) * rows] for n in range(updates)]
    return [sorted(update, key=lambda r: -len(r["ids"])) for update in cut]


def best_for_trl(task: dict[str, Any], batches: list[int], trl_python: Path, scratch: Path) -> dict[str, Any]:
    """Return the fastest of TRL's settings over one update after a warm-up."""
    short = task | {"updates": task["updates"][:2]}
    rows = len(task["updates"][0])
    fitting = [b for b in batches if rows % b == 0]
    settings = [{"trl_batch": b, "trl_padding_free": free} for b, free in product(fitting, (False, True))]
    taken = []
    for setting in settings:
        taken.append(run("trl", short | setting, trl_python, scratch).cpu_seconds[-1])
        say(f"TRL tries {setting}: {taken[-1]:.1f} CPU seconds for an update")
    return settings[taken.index(min(taken))]


def run(who: str, task: dict[str, Any], trl_python: Path, scratch: Path) -> Measured:
    file = scratch / "task.json"
    file.write_text(json.dumps(task))
    ours = [sys.executable, "-m", "benchmarks.sft_vs_trl", "--ours", str(file)]
    theirs = [str(trl_python.absolute()), str(ROOT / "benchmarks/trl_sft.py"), str(file)]
    out = subprocess.run(
        ours if who == "ours" else theirs,
        cwd=ROOT if who == "ours" else scratch,  # nothing of ours is to be imported there
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ).stdout
    return Measured(**json.loads(out.splitlines()[-1]))


def our_run(task: dict[str, Any]) -> dict[str, Any]:
    import torch

    from algs.sft import SFT
    from configs.trainer_schema import ModelConfig, TrainerConfig
    from core.types import Prompt, Sample, make_sample
    from data_feeds.packing import plan_update
    from trainers.local import LocalTrainer

    def sample(row: dict[str, Any]) -> Sample:
        n = len(row["ids"])
        rest = {"rollout_logp": [0.0] * n, "versions": [-1] * n}
        return make_sample(prompt=Prompt(id="", messages=[]), token_ids=row["ids"], action_mask=row["mask"], **rest)

    torch.set_num_threads(task["threads"])
    cfg = TrainerConfig(lr=task["lr"], micro_batch_tokens=task["micro_batch_tokens"])
    model = ModelConfig(path=task["model"], dtype="float32")
    trainer = LocalTrainer(model, cfg, SFT(), temperature=1.0, total_updates=len(task["updates"]))
    updates = [[[sample(row)] for row in update] for update in task["updates"]]
    losses: list[float] = []
    ends = [(time.perf_counter(), time.process_time())]
    for groups in updates:
        plan = plan_update(groups, "token", cfg.micro_batch_tokens, padded=trainer.describe_layout().padded)
        losses.append(trainer.step(plan.batches())["loss"])
        ends.append((time.perf_counter(), time.process_time()))
    spans = list(pairwise(ends))
    return {
        "seconds": [after[0] - before[0] for before, after in spans],
        "cpu_seconds": [after[1] - before[1] for before, after in spans],
        "losses": losses,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def speed(task: dict[str, Any], seconds: list[float]) -> float:
    """Learnt tokens per second after the warm-up."""
    trained = sum(sum(row["mask"]) for update in task["updates"][1:] for row in update)
    return trained / sum(seconds[1:])


def report(task: dict[str, Any], runs: dict[str, list[Measured]]) -> int:
    wall = {who: [speed(task, m.seconds) for m in done] for who, done in runs.items()}
    cpu = {who: [speed(task, m.cpu_seconds) for m in done] for who, done in runs.items()}
    peak = {who: max(m.peak_mib for m in done) for who, done in runs.items()}
    lengths = sorted(len(row["ids"]) for update in task["updates"] for row in update)
    chosen = f"{task['trl_batch']} rows in a forward pass, padding_free={task['trl_padding_free']}"
    spread = f"{lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]})"
    print(
        f"\n{len(task['updates'][0])} rows of {spread} in an update, {len(task['updates']) - 1} updates x "
        f"{len(wall['ours'])} runs, {task['threads']} threads; TRL with {chosen}\n"
    )
    print(f"{'trained tokens/s':<26}{'ours':>10}{'TRL':>10}{'ratio':>8}   lowest to highest of ours, of TRL")
    ratios = {}
    for name, numbers in (("wall clock, median", wall), ("CPU time, median", cpu)):
        ours, theirs = statistics.median(numbers["ours"]), statistics.median(numbers["trl"])
        ratios[name] = ours / theirs
        spread = ", ".join(f"{min(n):.1f} to {max(n):.1f}" for n in (numbers["ours"], numbers["trl"]))
        print(f"{name:<26}{ours:>10.1f}{theirs:>10.1f}{ours / theirs:>8.2f}   {spread}")
    print(f"{'peak memory, MiB':<26}{peak['ours']:>10.0f}{peak['trl']:>10.0f}{peak['ours'] / peak['trl']:>8.2f}")
    pairs = list(zip(runs["ours"][0].losses, runs["trl"][0].losses, strict=True))
    print("losses, ours and TRL's: " + ", ".join(f"{a:.4f} {b:.4f}" for a, b in pairs))
    same = abs(pairs[0][0] - pairs[0][1]) < 1e-3 and all(abs(a - b) < 1e-2 for a, b in pairs)
    reached = ratios["wall clock, median"] >= GOAL and peak["ours"] <= peak["trl"] and same
    print(f"goal, {GOAL} times TRL in no more memory and with the same losses: {'reached' if reached else 'missed'}")
    return 0 if reached else 1


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
        (python.parent.parent / "made").touch()
    return python


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
