"""Preference learning beside TRL's DPOTrainer: python -m tools.benchmarks.dpo_vs_trl --data hh_rlhf.jsonl

The work: DPO (sigmoid, beta 0.1) of SmolLM2-135M-Instruct in float32 on pairs of HH-RLHF, with the reference's
log-probabilities computed in every update on both sides, AdamW with clipping, no activation checkpointing. Ours is the
reference trainer (backend: local): planning, packing, scoring and `step`, as main_sl.py calls them; the prompt of a
pair is computed once. TRL's is 1.16 at its best known for a CPU: see tools/benchmarks/sft_vs_trl.py. Its padding_free
is switched off in this version, with a warning of its own.

How it is measured and printed is as for supervised learning, with tokens of both replies. Exit code 1 where ours is
not 2.5 times as fast, or the losses differ.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.benchmarks.beside_trl import Benchmark, Row, cut_updates, run_benchmark
from tools.benchmarks.processes import ROOT

if TYPE_CHECKING:
    from core.types.samples import Group, Sample

LONGEST = 512
"""Tokens of a conversation; longer pairs are left out."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.dpo_vs_trl", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--data", type=Path, default=ROOT / "unit_tests/data/hh_rlhf_rows.jsonl", help="as HH-RLHF has it"
    )
    parser.add_argument("--micro-batch-tokens", type=int, default=1024, help="ours")
    benchmark = Benchmark(
        module="tools.benchmarks.dpo_vs_trl",
        trl_side="dpo",
        goal=2.5,
        settings=(),
        count_trained=lambda row: len(row["chosen_ids"]) + len(row["rejected_ids"]),
        count_tokens=lambda row: sum(map(len, row.values())),
        make_updates=make_updates,
        train=train,
    )
    return run_benchmark(benchmark, parser)


def make_updates(args: argparse.Namespace) -> list[list[Row]]:
    """Return ids of prompt and replies, [update][pair]: drawn at random, the longest of an update first."""
    from configs.data_schema import RowDataConfig
    from data_feeds.chat.tokenizer import ChatTokenizer
    from data_feeds.feed import load_groups
    from data_prep.hh_rlhf import main as convert

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "pairs.jsonl"
        convert(["--split", "train", "--from", str(args.data), "--out", str(file)])
        data = RowDataConfig(train=str(file), max_tokens=LONGEST, max_invalid_fraction=0.5)
        feed = load_groups(data, "train", ChatTokenizer(str(ROOT / args.model), "chat"), rows="pairs", seed=0)
    fitting = [list_pair_ids(pair) for pair in feed.all()]
    random.Random(0).shuffle(fitting)
    return cut_updates(fitting, args, find_length)


def list_pair_ids(pair: Group) -> Row:
    """Return the token ids of prompt and replies of a pair, as DPOTrainer names them."""
    chosen, rejected = pair
    # the first True of the mask is where the prompt ends
    prompt = int(chosen.action_mask.argmax())

    def reply_of(sample: Sample) -> list[int]:
        trained = sample.action_mask.nonzero()[0]
        # up to the last trained token: what a template writes behind it is not trained on
        return sample.token_ids[prompt : trained[-1] + 1].tolist()

    ids = {"chosen_ids": reply_of(chosen), "rejected_ids": reply_of(rejected)}
    return {"prompt_ids": chosen.token_ids[:prompt].tolist(), **ids}


def find_length(row: Row) -> int:
    """Return the length of a pair's longer conversation, in tokens."""
    return len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def train(task: dict[str, Any]) -> Iterator[float]:
    """Train with DPO on the pairs of a task. Yield once when the trainer is ready, then the loss of each update."""
    import asyncio

    import torch

    from algs.base import assign_advantages
    from algs.dpo import DPO
    from configs.trainer_schema import ModelConfig, TrainerConfig
    from core.cluster.workers import Local
    from core.types.samples import Prompt, make_sample
    from data_feeds.packing.batches import Plan, plan_update
    from driver.rl.scoring import compute_columns
    from trainers.local import LocalTrainer

    def sample(before: list[int], reply: list[int], reward: float) -> Sample:
        n = len(before) + len(reply)
        return make_sample(
            prompt=Prompt(id="", messages=[]),
            token_ids=before + reply,
            action_mask=[False] * len(before) + [True] * len(reply),
            rollout_logp=[0.0] * n,
            versions=[-1] * n,
            reward=reward,
        )

    torch.set_num_threads(task["threads"])
    cfg = TrainerConfig(lr=task["lr"], micro_batch_tokens=task["micro_batch_tokens"])
    model, alg = ModelConfig(path=task["model"], dtype="float32"), DPO(beta=0.1)
    trainer = LocalTrainer(model, cfg, alg, temperature=1.0, total_updates=len(task["updates"]))
    layout = trainer.describe_layout()

    def plan(groups: list[Group]) -> Plan:
        how = {"padded": layout.padded, "share_prefixes": layout.shares_prefixes, "whole_groups": alg.whole_groups}
        return plan_update(groups, alg.loss_norm, cfg.micro_batch_tokens, **how)

    replies = (("chosen_ids", 1.0), ("rejected_ids", 0.0))
    updates = [
        [[sample(r["prompt_ids"], r[name], reward) for name, reward in replies] for r in u] for u in task["updates"]
    ]
    yield 0.0
    for drawn in updates:
        groups = alg.prepare_groups(drawn)
        scored = asyncio.run(compute_columns(Local(trainer), groups, plan(groups), alg.required_columns))
        yield trainer.step(plan(assign_advantages(alg, scored)).batches())["loss"]


if __name__ == "__main__":
    sys.exit(main())
