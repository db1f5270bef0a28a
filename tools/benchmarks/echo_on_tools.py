"""Does ECHO learn faster than GRPO alone, at equal samples? The function calls of configs/tools_quickstart.yaml.

    python -m tools.benchmarks.echo_on_tools [--seeds 0 1 2] [--steps 28] [--alpha 0.1]

Warms the tiny model up (configs/tools_quickstart_sft.yaml), trains it with both from the same weights and on the same
prompts, and prints of each the steps to GOAL, the mean reward over all steps and the held-out reward, and which one is
ahead. Needs no network; about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tools.benchmarks.processes import ROOT, read_metrics

GOAL = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Result of a run."""

    steps: int | None
    """Steps until the mean reward of one was at least GOAL; None if none was."""
    mean: float
    """Mean reward over all steps: the area under the curve."""
    held_out: float
    """Held-out reward after training."""


def call(*command: str) -> None:
    """Run a module or program of the repository. A failure ends this program."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}")


def warm_up(folder: Path, *, seed: int) -> None:
    """Make model, data and the supervised warm-up, under `folder`."""
    base, data = str(folder / "base"), str(folder / "data")
    call("-m", "data_prep.tiny_model", "--tools", "--hidden-size", "128", "--heads", "4", "--out", base)
    sizes = ["--train", "400", "--eval", "200", "--sft", "8000", "--wrong-share", "0.85"]
    call("-m", "data_prep.function_calls", *sizes, "--out", data)
    at = [f"model.path={base}", f"data.train={data}/sft.jsonl", f"save_to={folder / 'warm'}", f"seed={seed}"]
    here = [f"run_dir={folder / 'runs'}", "backend=local"]
    call("main_sl.py", "--config", "configs/tools_quickstart_sft.yaml", *at, *here)


def learn(folder: Path, alg: dict[str, Any], *, seed: int, steps: int) -> Learnt:
    """Train the warmed-up model."""
    name, runs = f"{alg['name']}_{seed}", folder / "runs"
    data = [f"data.{key}={folder / 'data' / key}.jsonl" for key in ("train", "eval")]
    settings = [f"model.path={folder / 'warm'}", f"seed={seed}", f"steps={steps}", f"alg={json.dumps(alg)}"]
    where = [f"name={name}", f"run_dir={runs}"]
    call("main_rl.py", "--config", "configs/tools_quickstart.yaml", *data, *settings, *where)
    [run] = runs.glob(f"{name}-*")
    rewards = [step["reward/mean"] for step in read_metrics(run)]
    reached = next((n for n, reward in enumerate(rewards, 1) if reward >= GOAL), None)
    after = json.loads((run / "summary.json").read_text())["after"]
    return Learnt(steps=reached, mean=fmean(rewards), held_out=after["reward/correct"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--alpha", type=float, default=0.1)
    args = parser.parse_args()
    algs: list[dict[str, Any]] = [{"name": "grpo"}, {"name": "echo", "alpha": args.alpha}]
    found: dict[str, list[Learnt]] = {alg["name"]: [] for alg in algs}
    print(f"{'algorithm':12} {'seed':>4} {'steps to 0.9':>12} {'mean reward':>11} {'held out':>8}")
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as at:
            warm_up(Path(at), seed=seed)
            for alg in algs:
                one = learn(Path(at), alg, seed=seed, steps=args.steps)
                found[alg["name"]].append(one)
                numbers = f"{one.steps or '-':>12} {one.mean:11.3f} {one.held_out:8.3f}"
                print(f"{alg['name']:12} {seed:4} {numbers}", flush=True)
    grpo, echo = (fmean(one.mean for one in found[name]) for name in ("grpo", "echo"))
    better = sum(b.mean > a.mean for a, b in zip(found["grpo"], found["echo"], strict=True))
    verdict = "ahead of" if echo > grpo else "not ahead of"
    print(
        f"ECHO is {verdict} GRPO: mean reward {echo:.3f} and {grpo:.3f}, more with {better} of {len(args.seeds)} seeds"
    )


if __name__ == "__main__":
    main()
