"""How large is the run page of a long run, and how long until it is open? python -m tools.benchmarks.report_page

A made-up run of 200 steps with 64 groups of 8 samples each, of about 128 tokens, is written as a run folder; its page
is made and opened in a headless Chromium. Told are the seconds to make it, its size, the seconds until its script is
ready (from the start of the navigation), and the seconds until a step's samples are shown. Wall-clock seconds depend on
what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from analysis.report.page import write_page
from core import metrics as names
from core.timing.phases import Phase, time_metric
from tools.browser import MISSING, Browser, find_browser

SMALL_ENOUGH, FAST_ENOUGH_S = 50.0, 3.0
"""Goals: megabytes of the page, seconds until it is ready."""


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.report_page", description="Measure the run page of a long run."
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--samples", type=int, default=32, help="samples of a step in the page")
    args = parser.parse_args(argv)
    program = find_browser()
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        run = make_run(home / "run", steps=args.steps)
        page = home / "page.html"
        began = time.perf_counter()
        write_page([run], page, samples=args.samples, everything=False)
        print(f"made in {time.perf_counter() - began:.1f} s")
        megabytes = page.stat().st_size / 1e6
        print(f"size: {megabytes:.1f} MB (goal: below {SMALL_ENOUGH:g})")
        if program is None:
            print(MISSING)
            return int(megabytes >= SMALL_ENOUGH)
        with Browser(program, home / "profile") as browser:
            began = time.perf_counter()
            browser.open(page)
            opened = time.perf_counter() - began
            ready = browser.ask("Number(document.body.dataset.ready)") / 1000
            print(f"script ready after {ready:.2f} s, told to us after {opened:.2f} s (goal: below {FAST_ENOUGH_S:g})")
            began = time.perf_counter()
            browser.ask(f"void (location.hash = 'samples/r0/{args.steps // 2}')")
            browser.wait_for("document.querySelector('.sample .completion')")
            print(f"a step's samples after {time.perf_counter() - began:.2f} s")
    return int(megabytes >= SMALL_ENOUGH or opened >= FAST_ENOUGH_S)


if __name__ == "__main__":
    sys.exit(main())
