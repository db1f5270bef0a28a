"""Bytes and seconds of a sync of deltas beside one of all weights: python -m tools.benchmarks.delta_sync

SmolLM2-135M-Instruct in bfloat16 makes steps of GRPO with AdamW on random samples, at each learning rate. After each
step its weights go over gloo to a receiver in another thread, as deltas and whole. Seconds are those until the receiver
has all tensors, on the loopback device, where bytes cost nearly nothing. The last column is the speed of a network
below which deltas are faster.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import fmean

from torch import Tensor

from algs.grpo import GRPO
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.types.weights import Bucket
from data_feeds.packing.batches import micro_batches
from tools.benchmarks.beside_trl import SMOLLM2, make_smollm2
from tools.benchmarks.processes import print_row
from tools.benchmarks.random_task import make_groups
from trainers.local import LocalTrainer
from trainers.weight_sync.broadcast import WeightReceiver, WeightSender
from trainers.weight_sync.delta import Coding, DeltaDecoder, DeltaEncoder
from trainers.weight_sync.fingerprint import fingerprint

BUCKET_BYTES = 64 * 2**20
TIMEOUT_S = 600.0


@dataclass
class Pair:
    """A sender and a receiver over gloo, in two threads."""

    pool: ThreadPoolExecutor = field(default_factory=ThreadPoolExecutor)
    encoder: DeltaEncoder = field(default_factory=DeltaEncoder)
    decoder: DeltaDecoder = field(default_factory=DeltaDecoder)

    def __post_init__(self) -> None:
        self.sender = WeightSender(timeout_s=TIMEOUT_S)
        port, place = self.sender.open(), {"address": "127.0.0.1", "rank": 1, "members": 2}
        joined = self.pool.submit(WeightReceiver, port=port, timeout_s=TIMEOUT_S, **place)
        self.sender.join(members=2)
        self.receiver = joined.result()

    def sync(self, weights: Iterator[Bucket], coding: Coding) -> float:
        """Send the weights; return the seconds. Raises AssertionError if other ones arrive."""
        self.encoder.begin(coding)
        start = time.perf_counter()
        arriving = self.pool.submit(
            lambda: [(n, t) for b in self.receiver.receive() for n, t in self.decoder.decode(b)]
        )
        sent = self.sender.send(weights, self.encoder.encode)
        received: list[tuple[str, Tensor]] = arriving.result()
        seconds = time.perf_counter() - start
        assert fingerprint(received) == sent
        return seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.delta_sync", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=SMOLLM2, help="made by python -m data_prep.smollm2 if it is missing")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 2e-5])
    parser.add_argument("--steps", type=int, default=6, help="at least 2: the first is not counted")
    args = parser.parse_args()
    make_smollm2(args.model)
    print("lr       changed  by XOR  deltas                whole                 faster below")
    cells: list[str] = []
    for lr in args.lr:
        found = measure(args.model, lr, args.steps)
        print(found.describe(lr), flush=True)
        sizes = f"{found.mib:.1f} MiB instead of {found.whole_mib:.0f}"
        cells.append(f"{lr:g}: {sizes}, {found.seconds:.1f} s instead of {found.whole_s:.1f}")
    print_row(f"learning rate {'; '.join(cells)} (without a network between)")
    return 0


@dataclass(frozen=True, slots=True)
class Means:
    """Means of a learning rate over the steps after the first."""

    changed: float
    """Share of the values."""
    by_xor: float
    """Share of the tensors."""
    mib: float
    seconds: float
    whole_mib: float
    whole_s: float

    def describe(self, lr: float) -> str:
        speed = (self.whole_mib - self.mib) / max(self.seconds - self.whole_s, 1e-9)
        return (
            f"{lr:<8g} {self.changed:7.2%}  {self.by_xor:6.0%}  {self.mib:7.1f} MiB {self.seconds:6.2f} s  "
            f"{self.whole_mib:7.1f} MiB {self.whole_s:6.2f} s  {speed:,.0f} MiB/s"
        )


def measure(model: str, lr: float, steps: int) -> Means:
    """Train with a learning rate, and sync after each step in both ways."""
    trainer = LocalTrainer(
        ModelConfig(path=model, dtype="bfloat16"),
        TrainerConfig(lr=lr, micro_batch_tokens=2048),
        GRPO(),
        temperature=1.0,
        total_updates=steps,
    )
    [batches] = micro_batches(make_groups(2, 4, prompt=32, response=96, vocabulary=40_000), "token", 2048)
    coded, whole = Pair(), Pair()
    rows: list[tuple[float, ...]] = []
    coded.sync(trainer.export_weights(BUCKET_BYTES), "whole")
    for _ in range(steps):
        trainer.step([batches])
        seconds = coded.sync(trainer.export_weights(BUCKET_BYTES), "changes")
        plain = whole.sync(trainer.export_weights(BUCKET_BYTES), "plain")
        changes = coded.encoder.changes
        shares = changes.changed / changes.values, changes.by_xor / changes.tensors
        rows.append((*shares, coded.sender.sent_bytes / 2**20, seconds, whole.sender.sent_bytes / 2**20, plain))
    return Means(*map(fmean, zip(*rows[1:], strict=True)))


if __name__ == "__main__":
    sys.exit(main())
