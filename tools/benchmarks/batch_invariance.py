"""Cost of rollout.batch_invariant: python -m tools.benchmarks.batch_invariance MODEL

The engine hf samples --requests replies of --tokens tokens to prompts of --prompt tokens, and the local trainer makes
an update on them, with the usual order of sums and with the fixed one. Tokens per second are of the second of two
rounds, on a CPU. Both have the threads of OMP_NUM_THREADS, of which the fixed order uses one. The last columns count
tokens whose log-probability at the draw is the trainer's to the bit, and give the largest difference in nats.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass

import torch

from algs.sft import SFT
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.types.samples import Prompt, Sample
from data_feeds.packing.batches import pack
from modeling.hf_config import read_config
from rollouts.engines.base import Completion, EngineConfig
from rollouts.engines.hf import HfEngine
from rollouts.transcript import Conversation
from trainers.invariant import InvariantTrainer
from trainers.local import LocalTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Tokens per second of one order, and how far engine and trainer agree."""

    order: str
    sampled_per_s: float
    trained_per_s: float
    equal: int
    tokens: int
    largest: float

    def format(self) -> str:
        """Return a row of the table."""
        speeds = f"{self.sampled_per_s:,.1f} | {self.trained_per_s:,.1f}"
        return f"| {self.order} | {speeds} | {self.equal} of {self.tokens} | {self.largest:.1e} |"


def measure(args: argparse.Namespace, *, fixed: bool) -> Cost:
    """Sample and train twice; measure the second time, since the first also allocates and loads kernels.

    fixed: whether sums are added in the fixed order, by engine and trainer.
    """
    longest = args.prompt + args.tokens
    settings = {"model_path": args.model, "dtype": args.dtype, "max_model_len": longest, "stop_token_ids": ()}
    engine = HfEngine(EngineConfig(temperature=1.0, batch_invariant=fixed, **settings))
    random = torch.Generator().manual_seed(0)
    vocabulary = read_config(args.model).get_text_config().vocab_size
    prompts = torch.randint(vocabulary, (args.requests, args.prompt), generator=random).tolist()

    async def sample() -> list[Completion]:
        requests = (engine.generate(p, max_new_tokens=args.tokens, seed=i) for i, p in enumerate(prompts))
        return await asyncio.gather(*requests)

    asyncio.run(sample())
    begin = time.perf_counter()
    done = asyncio.run(sample())
    sampled_s = time.perf_counter() - begin
    samples = [make_row(p, c) for p, c in zip(prompts, done, strict=True)]
    make = InvariantTrainer if fixed else LocalTrainer
    model = ModelConfig(path=args.model, dtype=args.dtype)
    trainer = make(model, TrainerConfig(), SFT(), temperature=1.0, total_updates=2)
    batch = pack(samples, [1 / len(samples)] * len(samples))
    with torch.no_grad():
        logp = trainer.forward(trainer.load(batch), measures={}).logp
    trainer.step([[batch]])
    begin = time.perf_counter()
    trainer.step([[batch]])
    trained_s = time.perf_counter() - begin
    drawn = torch.tensor([x for c in done for x in c.logp])
    return Cost(
        order="fixed" if fixed else "usual",
        sampled_per_s=len(drawn) / sampled_s,
        trained_per_s=args.requests * longest / trained_s,
        equal=int((drawn == logp).sum()),
        tokens=len(drawn),
        largest=float((drawn - logp).abs().max()),
    )


def make_row(prompt: list[int], done: Completion) -> Sample:
    """Return the sample of a completion."""
    conversation = Conversation()
    conversation.append_context(prompt)
    conversation.append_reply(done)
    return conversation.make_sample(Prompt(id="made", messages=[]))


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the cost of rollout.batch_invariant on a CPU.")
    parser.add_argument("model", help="Hugging Face folder of a dense model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    for name, default in (("requests", 16), ("prompt", 64), ("tokens", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    print("| order | sampled tokens/s | trained tokens/s | equal bits | largest difference |\n|---|---|---|---|---|")
    for fixed in (False, True):
        print(measure(args, fixed=fixed).format(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
