"""Operations of a training step, and the peak of a device: their ratio is the model FLOPs utilisation (MFU)."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from algs.base import Algorithm
from configs.trainer_schema import TrainerConfig
from modeling.flops import TrainingFlops, count_training_flops
from modeling.load import DTYPES
from trainers.learner import Learner
from trainers.observers import BatchSeen, Observer

SIZES, PRODUCTS = {"cuda": 4096, "cpu": 512}, {"cuda": 50, "cpu": 2}
"""Rows of the square matrices whose product is timed, and number of products without a wait between them."""
REPEATS = 3


class Rank(Protocol):
    """Trainer rank whose updates are counted."""

    device: str
    cfg: TrainerConfig
    alg: Algorithm
    policy: Learner
    critic: Learner | None

    def sum_over_rows(self, values: Tensor) -> Tensor: ...


class Utilization(Observer):
    """Counter of the operations of a step's updates, over all ranks. Shared prefixes are computed and counted once."""

    trained: bool
    """Whether the step's updates are of the policy, too."""
    counts: Tensor
    """[3 + learners] float64: tokens, trained tokens, pairs of a token and one before it, and those in the window of
    each learner."""

    def __init__(self, rank: Rank):
        self.rank = rank
        self.flops: list[TrainingFlops] = []
        """Of the policy and the value model, counted in the first step."""

    def begin_step(self) -> None:
        if not self.flops:
            learners = [self.rank.policy, *([] if self.rank.critic is None else [self.rank.critic])]
            self.flops = [count_training_flops(learner.model) for learner in learners]
        self.trained = self.rank.alg.trains_policy
        shape = 3 + len(self.flops)
        self.counts = torch.zeros(shape, dtype=torch.float64, device=self.rank.device)

    def on_batch(self, seen: BatchSeen) -> None:
        batch = seen.batch
        before = batch.position_ids.double() + 1
        # new_full and not a tensor of a list, for which the host would wait
        sizes = [before.new_full((), float(len(one))) for one in (before, batch.labels)]
        near = [before.clamp(max=one.window).sum() for one in self.flops]
        self.counts += torch.stack([*sizes, before.sum(), *near])

    def finish(self) -> dict[str, float]:
        self.counts = self.rank.sum_over_rows(self.counts)
        return {}

    def read_tflops(self) -> float:
        """Return the operations of the last step's updates, in 10^12. It waits for a GPU."""
        tokens, labels, pairs, *near = self.counts.tolist()
        flops = [
            one.per_token * tokens + one.per_label * labels + one.per_pair * pairs + one.per_near_pair * own
            for one, own in zip(self.flops, near, strict=True)
        ]
        if not self.trained:  # its forward pass is a third
            flops[0] /= 3
        return sum(flops) / 1e12

    def find_peak(self, dtype: str) -> float:
        """Return the peak of this rank's device in teraflops per second: as the recipe names it, or measured."""
        named = self.rank.cfg.peak_tflops
        return measure_peak(torch.device(self.rank.device).type, DTYPES[dtype]) if named is None else named


@lru_cache
def measure_peak(device: str, dtype: torch.dtype) -> float:
    """Return the teraflops per second of a product of two square matrices, the fastest of a few."""
    size, products = SIZES[device], PRODUCTS[device]
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    seconds: list[float] = []
    for _ in range(REPEATS):
        float((matrix @ matrix)[0, 0])  # a GPU has nothing else to do now
        begin = time.perf_counter()
        for _ in range(products):
            product = matrix @ matrix
        float(product[0, 0])  # waits for a GPU
        seconds.append(time.perf_counter() - begin)
    return products * 2 * size**3 / min(seconds) / 1e12
