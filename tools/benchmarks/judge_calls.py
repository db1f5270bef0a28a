"""Seconds of a judge's verdicts: python -m tools.benchmarks.judge_calls

64 replies are scored through the reward processes of an engine. The judge is a server here that takes 100 ms, gives an
unreadable verdict every tenth time, and refuses requests above 32 in flight. Measured with 32 and 64 in flight,
and with 2 plain processes, as a reward with a blocking client would have. Exit code 1 if a sample fails with the judge.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.rollout_schema import RewardConfig
from core.types.samples import Prompt
from rewards.rewarder import Rewarder
from rewards.weights import plan_rewards
from tools.benchmarks.judge_server import JudgeServer

SAMPLES, SECONDS, AT_ONCE, UNREADABLE_EVERY = 64, 0.1, 32, 10
PROMPT = Prompt(id="0", messages=[{"role": "user", "content": "Write sevens."}])
BLOCKING = '''
import json, re, urllib.request

def score(prompt, messages, *, base_url):
    """Ask as a first draft of a reward would: one request, and the first number of the answer."""
    content = "<reply-0>\\n" + messages[-1]["content"] + "\\n</reply-0>"
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", body, {"Content-Type": "application/json"})
    text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    return {"score": float(re.search(r"[0-9.]+(?=</)", text)[0])}
'''
"""Reward with a blocking client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds and failures of one way to ask."""

    name: str
    seconds: float
    failed: int
    refused: int
    most_in_flight: int


def measure(name: str, reward: dict[str, Any], *, seconds: float = SECONDS, samples: int = SAMPLES) -> Measured:
    """Score all replies at once, after one that starts the processes."""
    server = JudgeServer(seconds=seconds, unreadable_every=UNREADABLE_EVERY, at_once=AT_ONCE)
    with server.running() as url:
        given = {**reward, "settings": {**reward["settings"], "base_url": url}}
        config = RewardConfig(**given, weights={"score": 1.0})
        rewarder = Rewarder(plan_rewards(config), config.workers, config.timeout_s, config.max_concurrency)
        with closing(rewarder):
            taken, failed = asyncio.run(score_all(rewarder, samples, config.workers))
    return Measured(
        name=name, seconds=taken, failed=failed, refused=server.refused, most_in_flight=server.most_in_flight
    )


async def score_all(rewarder: Rewarder, samples: int, workers: int) -> tuple[float, int]:
    """Return the seconds of all samples, and how many failed."""

    async def score(reply: str) -> bool:
        return bool((await rewarder.compute_reward(PROMPT, [{"role": "assistant", "content": reply}])).failure)

    await asyncio.gather(*(score(f"warm {i}") for i in range(workers)))
    start = time.perf_counter()
    failed = await asyncio.gather(*(score(f"7 {i}") for i in range(samples)))
    return time.perf_counter() - start, sum(failed)


def list_ways(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the rewards to measure, by name."""
    blocking = folder / "blocking.py"
    blocking.write_text(BLOCKING)
    asked: dict[str, Any] = {"model": "j", "outage_s": 30, "timeout_s": 10}
    judges = {
        f"judge, {n} in flight": {
            "function": "judge",
            "max_concurrency": SAMPLES,
            "timeout_s": 60,
            "settings": {**asked, "max_concurrency": n},
        }
        for n in (AT_ONCE, 2 * AT_ONCE)
    }
    return {"blocking client, 2 processes": {"function": str(blocking), "settings": {}}, **judges}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.judge_calls", description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts (default %(default)s)")
    args = parser.parse_args(argv)
    worst = 0
    print(f"{SAMPLES} samples, {SECONDS:g} s a request, at most {AT_ONCE} in flight\n")
    print(f"{'':<30}{'seconds':>8}{'failed':>8}{'refused':>9}{'in flight':>11}")
    with tempfile.TemporaryDirectory() as folder:
        for name, reward in list_ways(Path(folder)).items():
            runs = [measure(name, reward) for _ in range(args.repeats)]
            best = min(runs, key=lambda run: run.seconds)
            failed = max(run.failed for run in runs)
            worst += failed if reward["function"] == "judge" else 0
            print(f"{name:<30}{best.seconds:>8.2f}{failed:>8}{best.refused:>9}{best.most_in_flight:>11}")
    return int(worst > 0)


if __name__ == "__main__":
    sys.exit(main())
