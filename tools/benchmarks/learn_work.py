"""The work of tools/benchmarks/learn_vs_trl.py: the settings of each comparison, and one run of either side."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from core.timing.phases import STEP, time_metric
from tools.benchmarks.beside_trl import SMOLLM2, Row, make_smollm2, run_trl, say
from tools.benchmarks.learn_calls import make_calls, warm_up
from tools.benchmarks.learn_machine import Machine
from tools.benchmarks.processes import ROOT, read_metrics

HOME = "build/learn_vs_trl"
"""Models and data of the comparisons, from the repository's root."""
TINY, SUMS, CALLS = f"{HOME}/tiny", f"{HOME}/smollm2", f"{HOME}/calls"
SUMS_FORM = "Calculate {a} {op} {b}. Reply with the number only."


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A comparison: our recipe, and the settings of TRL that say the same."""

    recipe: dict[str, Any]
    """Recipe without seed, run folder and name. Paths begin at the repository's root."""
    held_out: str
    """Prompts of the reward after training."""
    new_tokens: int
    """Longest reply to them."""
    reward: str
    trl: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings of TRL's configuration besides those of `make_settings` in trl_side.py."""
    trl_rows: int
    """Rows in TRL's forward pass."""

    def hash_settings(self) -> str:
        """Return a digest of all settings and of TRL's program. Only results with the same digest are compared."""
        # as a syntax tree, in which comments do not count
        program = ast.dump(ast.parse((ROOT / "tools" / "benchmarks" / "trl_side.py").read_text()))
        listed = json.dumps([asdict(self), program], sort_keys=True)
        return hashlib.sha256(listed.encode()).hexdigest()[:12]


# GRPO of both: no division by the group's standard deviation, asymmetric clip, mean over tokens, no KL
SAME_GRPO = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "scale_rewards": "none"}

SMOLLM2_GRPO: dict[str, Any] = {
    "steps": 20,
    "groups_per_step": 8,
    "group_size": 8,
    "model": {"path": SMOLLM2, "dtype": "float32"},
    # TRL has none while it generates with transformers
    "alg": {"name": "grpo", "correction": {"level": "none"}},
    "trainer": {"lr": 2e-5, "lr_schedule": "linear", "warmup_updates": 3, "micro_batch_tokens": 2048},
}
"""Keys that both recipes of SmolLM2 have."""

WORKS: dict[tuple[str, str], Work] = {
    ("tiny", "grpo"): Work(
        recipe={
            "backend": "local",
            "steps": 20,
            "groups_per_step": 64,
            "group_size": 16,
            "updates_per_step": 8,
            "model": {"path": f"{TINY}/sft", "dtype": "float32"},
            "alg": {"name": "grpo"},
            "data": {"train": f"{TINY}/train.jsonl", "max_prompt_tokens": 32},
            "reward": {"function": "arithmetic"},
            "rollout": {"engine": "hf", "max_new_tokens": 8},
            "trainer": {"lr": 4e-4, "lr_schedule": "linear", "warmup_updates": 16},
        },
        held_out=f"{TINY}/eval.jsonl",
        new_tokens=8,
        reward="arithmetic",
        trl=SAME_GRPO,
        trl_rows=128,
    ),
    ("tiny", "sft"): Work(
        recipe={
            "backend": "local",
            "steps": 100,
            "rows_per_step": 64,
            "model": {"path": f"{TINY}/model", "dtype": "float32"},
            "alg": {"name": "sft"},
            "data": {"train": f"{TINY}/sft.jsonl", "max_tokens": 32},
            "trainer": {"lr": 2e-3, "lr_schedule": "cosine", "warmup_updates": 10, "betas": [0.9, 0.95]},
        },
        held_out=f"{TINY}/eval.jsonl",
        new_tokens=8,
        reward="arithmetic",
        trl={"adam_beta2": 0.95},
        trl_rows=64,
    ),
    ("tiny", "dpo"): Work(
        recipe={
            "backend": "local",
            "steps": 30,
            "rows_per_step": 32,
            "model": {"path": f"{TINY}/sft", "dtype": "float32"},
            "alg": {"name": "dpo", "beta": 0.1},
            "data": {"train": f"{TINY}/pairs.jsonl", "max_tokens": 32},
            "trainer": {"lr": 4e-4, "lr_schedule": "linear", "warmup_updates": 6},
        },
        held_out=f"{TINY}/eval.jsonl",
        new_tokens=8,
        reward="arithmetic",
        trl_rows=32,
    ),
    ("smollm2", "grpo"): Work(
        recipe=SMOLLM2_GRPO
        | {
            "data": {"train": f"{SUMS}/train.jsonl", "max_prompt_tokens": 64},
            "reward": {"function": "gsm8k", "weights": {"correct": 1.0}},
            "rollout": {"max_new_tokens": 24},
        },
        held_out=f"{SUMS}/eval.jsonl",
        new_tokens=24,
        reward="gsm8k",
        trl=SAME_GRPO,
        trl_rows=16,
    ),
    ("calls", "grpo"): Work(
        recipe=SMOLLM2_GRPO
        | {
            "steps": 8,
            "model": {"path": f"{CALLS}/sft", "dtype": "float32"},
            "data": {"train": f"{CALLS}/train.jsonl", "max_prompt_tokens": 64},
            "reward": {"function": "arithmetic"},
            "rollout": {"max_new_tokens": 32},
        },
        held_out=f"{CALLS}/eval.jsonl",
        new_tokens=32,
        reward="arithmetic",
        trl=SAME_GRPO,
        trl_rows=16,
    ),
}
"""Comparisons by task and method. Supervised ones draw every row at most once, so that the loss or the accuracy of a
step, which is computed before its update, is of rows that the run sees for the first time. Their sums may have been
trained on."""

MEASURES = {
    "grpo": "reward of a step",
    "sft": "probability of a token",
    "dpo": "pairs with a margin above 0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A run: the measure of every step, its seconds, and a digest of the rows of `draw_rows` in their order."""

    values: list[float]
    seconds: list[float]
    order: str


def prepare(task: str) -> None:
    """Make the model and the data of a task, if they are missing."""
    from data_prep import arithmetic

    if task in ("smollm2", "calls"):
        make_smollm2(SMOLLM2)
        if task == "calls" and not (ROOT / CALLS / "sft" / "config.json").is_file():
            make_calls(ROOT / CALLS, train=150, held_out=50, sft=480)
            warm_up(ROOT / SMOLLM2, ROOT / CALLS)
        elif task == "smollm2" and not (ROOT / SUMS / "train.jsonl").is_file():
            sizes = ["--max", "20", "--train", "150", "--eval", "50", "--prompt-form", SUMS_FORM]
            arithmetic.main(["--out", str(ROOT / SUMS), "--jsonl", *sizes])
        return
    from tools.gpu_day.runs import make_quickstart

    if not (ROOT / TINY / "sft" / "config.json").is_file():
        say(f"making the quickstart's model in {TINY}")
        make_quickstart(ROOT / TINY, small=False)
    if not (ROOT / TINY / "pairs.jsonl").is_file():
        sizes = ["--max", "49", "--padded", "--train", "0", "--eval", "200", "--pairs", "1000"]
        arithmetic.main(["--out", str(ROOT / TINY / "compared"), "--jsonl", *sizes])
        (ROOT / TINY / "compared" / "pairs.jsonl").rename(ROOT / TINY / "pairs.jsonl")


def write_recipe(work: Work, seed: int, scratch: Path, machine: Machine) -> Path:
    """Write our recipe with the keys of the machine; the trained model goes to `scratch`/ours."""
    places = {"run_dir": str(scratch / "runs"), "save_to": str(scratch / "ours")}
    file = scratch / "recipe.yaml"
    rest = {"name": "learn-vs-trl", "seed": seed, "display": "quiet"}
    file.write_text(json.dumps(machine.add_keys(work.recipe) | places | rest))
    return file


def run_ours(method: str, work: Work, recipe: Path, scratch: Path) -> Curve:
    """Run main_rl.py or main_sl.py; the model is saved in `scratch`/ours."""
    program = "main_rl.py" if method == "grpo" else "main_sl.py"
    command = [sys.executable, program, "--config", str(recipe)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    [run] = (scratch / "runs").iterdir()
    rows = read_metrics(run)
    measured = {
        "grpo": lambda row: row["reward/mean"],
        "sft": lambda row: math.exp(-row["train/loss"]),
        "dpo": lambda row: row["train/pair/accuracy"],
    }[method]
    drawn = draw_rows(method, recipe)
    if method == "grpo":
        check_prompts(run, drawn, work.recipe["group_size"])
    seconds = [row[time_metric(STEP)] for row in rows]
    return Curve(values=[measured(row) for row in rows], seconds=seconds, order=hash_rows(drawn))


def check_prompts(run: Path, drawn: list[list[Row]], group_size: int) -> None:
    """Compare the prompts of our run with those that TRL is given."""
    from tools.benchmarks.rl_vs_trl import prompts_of

    if prompts_of(run, group_size) != drawn:
        raise SystemExit(f"error: {run} trained on other prompts than those that TRL would be given")


def run_theirs(
    method: str,
    work: Work,
    recipe: Path,
    trl_python: Path,
    scratch: Path,
    *,
    machine: Machine,
    whole_groups: bool = False,
) -> Curve:
    """Run TRL's trainer on the rows of our run, in their order, with our learning rate of every update.

    The model is saved in `scratch`/trl. whole_groups: without TRL's shuffle of the samples over a step's updates.
    """
    from configs.schema import RLConfig, SLConfig
    from driver.load_recipe import load_recipe
    from trainers.optimizer import make_lr_schedule

    cfg = load_recipe(RLConfig if method == "grpo" else SLConfig, str(recipe), []).cfg
    schedule = make_lr_schedule(cfg.trainer, cfg.total_updates)
    drawn = draw_rows(method, recipe)
    task: dict[str, Any] = {
        "model": str(ROOT / cfg.model.path),
        "dtype": cfg.model.dtype,
        "seed": cfg.seed,
        "lr": cfg.trainer.lr,
        "lrs": [schedule(update) for update in range(cfg.total_updates)],
        "threads": machine.count_threads(cfg.backend),
        "scratch": str(scratch),
        "save_to": str(scratch / "trl"),
        "settings": {**work.trl, **machine.trl},
        "trl_batch": work.trl_rows,
        "trl_padding_free": False,
    }
    if isinstance(cfg, RLConfig):
        task |= {"steps": drawn, "group_size": cfg.group_size, "updates_per_step": cfg.updates_per_step}
        task |= {"new_tokens": cfg.rollout.max_new_tokens, "reward": work.reward}
        program = "trl_side_groups.py" if whole_groups else "trl_side.py"
        done = run_trl(method, task, trl_python, scratch, program=program)
        values = done["rewards"]
    else:
        done = run_trl(method, task | {"updates": drawn}, trl_python, scratch)
        values = done["accuracies"] if method == "dpo" else [math.exp(-loss) for loss in done["losses"]]
    return Curve(values=values, seconds=done["seconds"], order=hash_rows(drawn))


def draw_rows(method: str, recipe: Path) -> list[list[Row]]:
    """Return the rows of every step in the columns that TRL's trainer reads, in the order in which our run draws."""
    from configs.schema import RLConfig, SLConfig
    from data_feeds.chat.tokenizer import ChatTokenizer
    from data_feeds.feed import load_groups, load_prompts
    from driver.load_recipe import load_recipe
    from tools.benchmarks.dpo_vs_trl import list_pair_ids

    cfg = load_recipe(RLConfig if method == "grpo" else SLConfig, str(recipe), []).cfg
    tokenizer = ChatTokenizer(str(ROOT / cfg.model.path), "chat")
    if isinstance(cfg, RLConfig):
        prompts = load_prompts(cfg.data, "train", tokenizer, seed=cfg.seed)
        tickets = [range(n * cfg.groups_per_step, (n + 1) * cfg.groups_per_step) for n in range(cfg.steps)]
        return [[{"prompt": p.messages, "answer": p.answer} for p in map(prompts.draw, step)] for step in tickets]
    kind = "pairs" if method == "dpo" else "conversations"
    rows = load_groups(cfg.data, "train", tokenizer, rows=kind, seed=cfg.seed)
    tickets = [range(n * cfg.rows_per_step, (n + 1) * cfg.rows_per_step) for n in range(cfg.n_steps)]
    if method == "dpo":
        return [[list_pair_ids(pair) for pair in map(rows.draw, step)] for step in tickets]
    samples = [[sample for [sample] in map(rows.draw, step)] for step in tickets]
    return [[{"ids": s.token_ids.tolist(), "mask": s.action_mask.tolist()} for s in step] for step in samples]


def hash_rows(drawn: list[list[Row]]) -> str:
    return hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()[:12]


def measure_held_out(work: Work, model: Path, scratch: Path) -> float:
    """Return the mean reward of four sampled replies to each held-out prompt."""
    import main_eval

    longest = work.recipe["data"].get("max_prompt_tokens", 64)
    report = main_eval.run(
        {
            "name": "learn-vs-trl",
            "backend": "local",
            "run_dir": str(scratch / "evaluations"),
            "samples": 4,
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"sets": [{"path": str(ROOT / work.held_out)}], "max_prompt_tokens": longest},
            "reward": work.recipe.get("reward", {"function": work.reward}),
            "rollout": {"engine": "hf", "max_new_tokens": work.new_tokens},
        }
    )
    return report.table[0].metrics["mean"].value
