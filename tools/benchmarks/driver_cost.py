"""CPU seconds and memory of the driver's own work in one RL step: python -m tools.benchmarks.driver_cost

Made-up groups of eight samples, a prompt of 256 tokens and 256 to 3584 sampled ones, go through the driver's work of a
GRPO step with one update. That is staleness and group metrics, credit, the plan, the batches, and their serialisation
to four trainers. Pickle's protocol 5 writes buffers out of band, as Ray does it. No engine, no trainer and no Ray. Each
size runs in a process of its own. The median is taken of nine steps, or of as many as have four million tokens
together. All sizes are measured in several rounds, of which the median is told, because the machine's speed changes
within seconds. The memory is what the process needed at its peak beyond the groups themselves. Exit code 1 where a step
costs more than the goal.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import resource
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np

from algs.base import assign_advantages
from algs.grpo import GRPO
from algs.validate import check_advantages
from core.allocator import keep_freed_memory
from core.gc_control import collecting_seldom
from core.types.arrays import Ids
from core.types.samples import Group, Prompt, Sample
from data_feeds.packing.batches import plan_update
from driver.records.rollout_metrics import check_failures, measure_drawn, measure_groups, measure_staleness
from rollouts.scheduling.buffer import FinishedGroup
from tools.benchmarks.processes import print_row, run_for_json

GOAL = 0.045
"""CPU seconds per million tokens."""
SIZES = (50_000, 500_000, 2_000_000, 8_000_000, 32_000_000)
GROUP, PROMPT, SHORTEST, LONGEST = 8, 256, 256, 3584
RANKS, MICRO_BATCH_TOKENS = 4, 16_384
STEPS, MEASURED_TOKENS = 9, 4_000_000
"""Steps of each size at least, and tokens of them together: a short step is measured more often."""
STEP, MAX_STALENESS = 3, 1
STAGES = ("metrics", "credit", "plan", "batches", "serialise")


def draw_sample(rng: random.Random, group: int, prompt: Ids) -> Sample:
    """Return a sample as an engine sends it; its tokens have one of two versions, or both."""
    sampled = rng.randint(SHORTEST, LONGEST)
    # all old, all new, or cut by a weight sync: the three cases that staleness is measured of
    newer = rng.choice((0, sampled, rng.randint(0, sampled)))
    draw = np.random.default_rng(rng.getrandbits(32))
    n = PROMPT + sampled
    chosen = np.arange(n) >= PROMPT
    return Sample(
        prompt=Prompt(id=str(group), messages=[]),
        token_ids=np.concatenate([prompt, draw.integers(0, 2**15, sampled, dtype=np.int32)]),
        action_mask=chosen,
        rollout_logp=np.where(chosen, -draw.random(n, dtype=np.float32), np.float32(0)),
        versions=np.repeat(np.array([-1, STEP - 1, STEP], dtype=np.int32), (PROMPT, sampled - newer, newer)),
        reward=rng.random(),
    )


def make_groups(tokens: int) -> list[Group]:
    """Return groups of at least `tokens` tokens together."""
    rng = random.Random(0)
    groups: list[Group] = []
    made = 0
    while made < tokens:
        prompt = np.random.default_rng(rng.getrandbits(32)).integers(0, 2**15, PROMPT, dtype=np.int32)
        groups.append([draw_sample(rng, len(groups), prompt) for _ in range(GROUP)])
        made += sum(len(s.token_ids) for s in groups[-1])
    return groups


def run_step(groups: list[Group], alg: GRPO) -> dict[str, float]:
    """Run the driver's work of one step; return the CPU seconds of each stage."""
    seconds: dict[str, float] = {}
    now = time.process_time()

    def lap(stage: str) -> None:
        nonlocal now
        before, now = now, time.process_time()
        seconds[stage] = now - before

    drawn = [FinishedGroup(ticket=i, group=g, accepted=True, seconds=1.0) for i, g in enumerate(groups)]
    check_failures(groups, max_failed_fraction=0.0)
    measure_staleness(groups, step=STEP, max_staleness=MAX_STALENESS)
    measure_drawn(drawn)
    measure_groups(groups)
    lap("metrics")
    credited = assign_advantages(alg, groups)
    check_advantages(alg, groups, credited)
    lap("credit")
    plan = plan_update(credited, alg.loss_norm, MICRO_BATCH_TOKENS, ranks=RANKS, padded=False, share_prefixes=True)
    lap("plan")
    batches = plan.batches()
    _ = plan.measure_shared(batches), plan.padding  # for the log
    lap("batches")
    for shard in batches:
        # out of band: Ray copies the buffers itself, and the driver's Python does not
        pickle.dumps([shard], protocol=5, buffer_callback=lambda _: None)
    lap("serialise")
    return seconds


def take_medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    return {stage: statistics.median(step[stage] for step in steps) for stage in STAGES}


def measure(tokens: int) -> dict[str, float]:
    """Return the CPU seconds of each stage, the tokens of a step and the bytes at the peak of this process."""
    keep_freed_memory()  # as the driver does
    alg = GRPO()  # validated once in a run, whose steps have copies
    run_step(make_groups(20_000), alg)  # imports, and the threads of the libraries
    groups = make_groups(tokens)
    # the groups are there in any case, so only what is above them is the step's
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with collecting_seldom(True):  # as a run on Ray does
        seconds = take_medians([run_step(groups, alg) for _ in range(max(STEPS, MEASURED_TOKENS // tokens))])
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held)
    return seconds | {"tokens": sum(len(s.token_ids) for g in groups for s in g), "peak": float(peak)}


def measure_apart(tokens: int) -> dict[str, float]:
    """Measure the driver's cost in a process of its own; see `measure`."""
    return run_for_json([sys.executable, "-m", "tools.benchmarks.driver_cost", "--one", str(tokens)])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.driver_cost", description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=SIZES, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=3, help="of all sizes")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one is not None:
        print(json.dumps(measure(args.one)))
        return 0
    rounds: list[list[dict[str, float]]] = []
    for number in range(args.rounds):
        # every second round backwards, so that a machine that slows down meanwhile slows all sizes alike
        sizes = args.tokens[::-1] if number % 2 else args.tokens
        got = [measure_apart(tokens) for tokens in sizes]
        rounds.append(got[::-1] if number % 2 else got)
        print(f"round {number + 1} of {args.rounds} is done", file=sys.stderr)
    print("CPU seconds per million tokens")
    print(f"{'tokens':>12}" + "".join(f"{stage:>11}" for stage in (*STAGES, "together")) + f"{'peak, bytes/token':>19}")
    costs: list[str] = []
    missed = False
    for own in zip(*rounds, strict=True):
        tokens, peak, seconds = own[0]["tokens"], max(one["peak"] for one in own), take_medians(own)
        each = [seconds[stage] / tokens * 1e6 for stage in STAGES]
        row = "".join(f"{x:>11.4f}" for x in (*each, sum(each)))
        print(f"{tokens:>12,.0f}{row}{peak / tokens:>19.0f}")
        costs.append(f"{sum(each):.3f}")
        missed |= sum(each) > GOAL
    print(f"goal, at most {GOAL:g} s per million tokens: {'missed' if missed else 'reached'}")
    print_row(f"{', '.join(costs)} s of CPU time per million tokens")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
