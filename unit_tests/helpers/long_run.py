"""A made-up run folder, of any length."""

from __future__ import annotations

import json
import random
from pathlib import Path

from core import metrics as names
from core.timing.phases import Phase, time_metric


def make_run(folder: Path, *, steps: int = 200, groups: int = 64, size: int = 8, words: int = 96) -> Path:
    """Write a run folder with made-up metrics and samples, the same every time."""
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(4000)]
    (folder / "samples").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"name: long\nsteps: {steps}\ngroups_per_step: {groups}\ngroup_size: {size}\n")
    (folder / "summary.json").write_text('{"exit_reason": "done"}')
    with (folder / "metrics.jsonl").open("w") as log:
        for step in range(steps):
            rows = [draw_row(rng, vocabulary, words, group=g) for g in range(groups) for _ in range(size)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / "samples" / f"step_{step:05d}.jsonl").write_text(text)
            log.write(json.dumps(draw_line(rng, step, rows)) + "\n")
    return folder


def draw_row(rng: random.Random, vocabulary: list[str], words: int, *, group: int) -> dict[str, object]:
    reward = float(rng.random() < 0.5)
    return {
        "group": group,
        "id": f"made-up/{group}",
        "prompt": [{"role": "user", "content": f"question {group}: " + " ".join(vocabulary[group : group + 20])}],
        "answer": str(group),
        "completion": " ".join(rng.choices(vocabulary, k=words)),
        "stop": "eos",
        "reward": reward,
        "reward_parts": {"correct": reward},
        "failure": "",
        "advantage": reward - 0.5,
        "versions": [0],
        "new_tokens": 4 * words // 3,
    }


def draw_line(rng: random.Random, step: int, rows: list[dict[str, object]]) -> dict[str, float]:
    """Return a step's metrics: every declared one that has no free part in its name."""
    fixed = [metric.name for metric in names.METRICS if "<" not in metric.name]
    tokens = float(sum(int(str(row["new_tokens"])) for row in rows))
    known = {
        names.STEP_NUMBER: float(step),
        names.ROLLOUT_SAMPLES: float(len(rows)),
        names.ROLLOUT_TOKENS: tokens,
        names.TRAIN_TOKENS: tokens,
        names.ROLLOUT_WASTED: 0.0,
        names.STEP_SECONDS: 10.0,
        time_metric(Phase.TRAIN): 6.0,
        names.TRAIN_SKIPPED: 0.0,
        names.ROLLOUT_FAILED: 0.0,
    }
    return {name: rng.random() for name in fixed} | known
