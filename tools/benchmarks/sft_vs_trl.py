"""Supervised learning beside TRL's SFTTrainer: python -m tools.benchmarks.sft_vs_trl --data gsm8k.jsonl

The work: SmolLM2-135M-Instruct in float32, GSM8K questions and worked answers with their spread of lengths, loss on the
answers only, the same rows in every update, AdamW with clipping, no activation checkpointing. Ours is the reference
trainer (backend: local): planning, packing and `step`, as main_sl.py calls them. TRL's is 1.16 in an environment of its
own, at its best known for a CPU. The rows of an update are sorted by length, so that it pads little (as good as its
group_by_length can be). AdamW is fused, and gradient checkpointing off (its default is on). The number of rows in a
forward pass is the fastest of those tried. Its packing and padding_free are made for flash attention, which no CPU has;
padding_free is tried all the same. Liger's kernels want a GPU.

Both run in processes of their own, in turns, ours first and TRL's first alternately; the first update of each is
warm-up. It prints trained tokens per second and the peak of resident memory. Seconds are of the wall clock, and of the
CPU time, which is steadier on a machine with other work. Exit code 1 where ours is not 1.5 times as fast, or the losses
differ. More tokens in a forward pass are faster and take more memory.

Without --trl-python the environment is made under build/, from PyPI and where that has no CPU build of torch, from
PyTorch's index.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.benchmarks.beside_trl import Benchmark, Row, cut_updates, run_benchmark
from tools.benchmarks.processes import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.sft_vs_trl", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--data", type=Path, default=ROOT / "unit_tests/data/gsm8k_rows.jsonl", help="JSONL as GSM8K has it"
    )
    parser.add_argument("--micro-batch-tokens", type=int, default=1024, help="ours")
    benchmark = Benchmark(
        module="tools.benchmarks.sft_vs_trl",
        trl_side="sft",
        goal=1.5,
        settings=("trl_padding_free",),
        count_trained=lambda row: sum(row["mask"]),
        count_tokens=lambda row: len(row["ids"]),
        make_updates=make_updates,
        train=train,
    )
    return run_benchmark(benchmark, parser)


def make_updates(args: argparse.Namespace) -> list[list[Row]]:
    """Return ids and mask, [update][row]: drawn at random without replacement until all rows are used, then again."""
    from data_feeds.chat.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer(str(ROOT / args.model), "chat")
    given = [json.loads(line) for line in args.data.read_text().splitlines() if line.strip()]
    random.Random(0).shuffle(given)

    def encoded(row: dict[str, str]) -> Row:
        turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        ids, mask = tokenizer.mask_turns(turns)
        return {"ids": ids, "mask": [False, *mask[1:]]}

    chosen = given[: args.rows * (1 + args.updates)]
    return cut_updates([encoded(row) for row in chosen], args, lambda row: len(row["ids"]))


def train(task: dict[str, Any]) -> Iterator[float]:
    import torch

    from algs.sft import SFT
    from configs.trainer_schema import ModelConfig, TrainerConfig
    from core.types.samples import Prompt, Sample, make_sample
    from data_feeds.packing.batches import plan_update
    from trainers.local import LocalTrainer

    def sample(row: Row) -> Sample:
        n = len(row["ids"])
        rest = {"rollout_logp": [0.0] * n, "versions": [-1] * n}
        return make_sample(prompt=Prompt(id="", messages=[]), token_ids=row["ids"], action_mask=row["mask"], **rest)

    torch.set_num_threads(task["threads"])
    cfg = TrainerConfig(lr=task["lr"], micro_batch_tokens=task["micro_batch_tokens"])
    model = ModelConfig(path=task["model"], dtype="float32")
    trainer = LocalTrainer(model, cfg, SFT(), temperature=1.0, total_updates=len(task["updates"]))
    updates = [[[sample(row)] for row in update] for update in task["updates"]]
    layout = trainer.describe_layout()
    how = {"padded": layout.padded, "share_prefixes": layout.shares_prefixes}
    yield 0.0
    for groups in updates:
        yield trainer.step(plan_update(groups, "token", cfg.micro_batch_tokens, **how).batches())["loss"]


if __name__ == "__main__":
    sys.exit(main())
