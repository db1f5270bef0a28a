"""Operations of a training step, and the peak of a device: their ratio is the model FLOPs utilisation (MFU)."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from configs.trainer_schema import TrainerConfig
from modeling.flops import TrainingFlops, count_training_flops
from modeling.load import DTYPES
from trainers.learner import Learner
from trainers.observers import BatchSeen, Observer

SIZES = {"cuda": 4096, "cpu": 512}
"""Rows of the square matrices whose product is timed."""
REPEATS = 4


class Rank(Protocol):
    """Trainer rank whose updates are counted."""

    device: str
    cfg: TrainerConfig
    policy: Learner
    critic: Learner | None

    def sum_over_rows(self, values: Tensor) -> Tensor: ...


class Utilization(Observer):
    """Counter of the operations of a step's updates, over all ranks. Shared prefixes are computed and counted once."""

    def __init__(self, rank: Rank):
        self.rank = rank
        self.counts = torch.zeros(0)
        """[2] float64, tokens, and pairs of a token and one before it."""
        self.tflops = 0.0
        self.flops: list[TrainingFlops] = []
        """Of the policy and the value model, counted in the first step."""

    def begin_step(self) -> None:
        if not self.flops:
            learners = [self.rank.policy, *([] if self.rank.critic is None else [self.rank.critic])]
            self.flops = [count_training_flops(learner.model) for learner in learners]
        self.counts = torch.zeros(2, dtype=torch.float64, device=self.rank.device)

    def on_batch(self, seen: BatchSeen) -> None:
        pairs = (seen.batch.position_ids.double() + 1).sum()
        self.counts += torch.stack([torch.full_like(pairs, len(seen.batch.position_ids)), pairs])

    def finish(self) -> dict[str, float]:
        tokens, pairs = self.rank.sum_over_rows(self.counts).tolist()
        self.tflops = sum(one.per_token * tokens + one.per_pair * pairs for one in self.flops) / 1e12
        return {}

    def read_tflops(self) -> float:
        """Return the operations of the last step's updates, in 10^12."""
        return self.tflops

    def find_peak(self, dtype: str) -> float:
        """Return the peak of this rank's device in teraflops per second: as the recipe names it, or measured."""
        named = self.rank.cfg.peak_tflops
        return measure_peak(torch.device(self.rank.device).type, DTYPES[dtype]) if named is None else named


@lru_cache
def measure_peak(device: str, dtype: torch.dtype) -> float:
    """Return the teraflops per second of a product of two square matrices, the fastest of a few."""
    size = SIZES[device]
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    seconds: list[float] = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for a GPU
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / min(seconds) / 1e12
