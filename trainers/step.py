"""One training step, the same for every trainer: what they differ in are five primitives.

forward(batch)             -> Policy of the model in training; forward_reference: of the frozen one
backward(loss)             add to the gradient of this update
gradients_are_finite()     -> the same answer on every rank
update(lr=, apply=)        clip and step, or throw the gradient away; -> its norm
add_up(tensor)             -> the sum over ranks
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from algs.base import Algorithm
from core.errors import RunStopped
from core.types import Batch, Column, Policy, Prompt, Sample, Tokens
from data_feeds.packing import pack
from trainers.optimizer import Schedule


class Steppable(Protocol):
    """A trainer, as this file sees it."""

    alg: Algorithm
    device: str
    schedule: Schedule
    updates_done: int
    skipped_in_a_row: int

    def forward(self, batch: Batch, *, temperature: float | None = None) -> Policy: ...
    def forward_reference(self, batch: Batch) -> Policy: ...
    def backward(self, loss: Tensor) -> None: ...
    def gradients_are_finite(self) -> bool: ...
    def update(self, *, lr: float, apply: bool) -> float: ...
    def add_up(self, values: Tensor) -> Tensor: ...


def train_step(trainer: Steppable, updates: list[list[Batch]], *, max_skipped: int) -> dict[str, float]:
    """Make one optimizer update per inner list of micro-batches; returns metrics, the same on every rank.

    The metrics are of the updates that were made; one that is skipped is counted.
    Every rank comes with the same number of updates and of micro-batches in each.
    """
    meter = Meter()
    norms: list[float] = []
    skipped = 0
    for micro in updates:
        this = Meter()
        for batch in with_totals(trainer, micro):
            policy = trainer.forward(batch)
            loss, metrics = trainer.alg.objective(policy, batch.tokens)
            check_per_token(trainer.alg, loss, metrics, batch.tokens)
            trainer.backward((loss * batch.tokens.weight).sum())
            this.add(batch.tokens, {"loss": loss, **metrics})
        norm = trainer.update(lr=trainer.schedule.at(trainer.updates_done), apply=trainer.gradients_are_finite())
        finite = math.isfinite(norm)  # the same on every rank
        if finite:
            meter.merge(this)
            norms.append(norm)
        trainer.updates_done += 1
        trainer.skipped_in_a_row = 0 if finite else trainer.skipped_in_a_row + 1
        skipped += not finite
        if trainer.skipped_in_a_row >= max_skipped:
            raise RunStopped(
                f"{trainer.skipped_in_a_row} updates in a row had a gradient that is not finite: "
                "the model or the loss diverged (trainer.max_skipped_updates says how many are borne)"
            )
    return {
        **meter.means(trainer),
        **({"grad_norm": sum(norms) / len(norms)} if norms else {}),
        "lr": trainer.schedule.at(trainer.updates_done - 1),
        "updates_skipped": float(skipped),
    }


def check_per_token(alg: Algorithm, loss: Tensor, metrics: dict[str, Tensor], tokens: Tokens) -> None:
    """A loss that reduced, or returned one value per sequence, must not be broadcast into a wrong result."""
    for name, value in {"the loss": loss, **metrics}.items():
        if value.shape != tokens.weight.shape:
            raise ValueError(
                f"{type(alg).__name__}: {name} has shape {list(value.shape)}, expected one value per learnt token, "
                f"{list(tokens.weight.shape)}: return it unreduced, the framework weighs and adds up"
            )


@torch.no_grad()
def with_totals(trainer: Steppable, micro: list[Batch]) -> list[Batch]:
    """Attach the algorithm's sums over this update, all micro-batches and ranks."""
    if type(trainer.alg).totals is Algorithm.totals:
        return micro
    parts = [trainer.alg.totals(trainer.forward(b), b.tokens) for b in micro]
    totals = {name: trainer.add_up(torch.stack([p[name] for p in parts]).sum(0)) for name in sorted(parts[0])}
    return [replace(b, tokens=replace(b.tokens, totals=totals)) for b in micro]


@torch.no_grad()
def measure(trainer: Steppable, micro: list[Batch]) -> dict[str, float]:
    """The metrics of an update without making it."""
    meter = Meter()
    for batch in with_totals(trainer, micro):
        loss, metrics = trainer.alg.objective(trainer.forward(batch), batch.tokens)
        meter.add(batch.tokens, {"loss": loss, **metrics})
    return meter.means(trainer)


@torch.no_grad()
def score_columns(trainer: Steppable, micro: list[Batch], columns: frozenset[Column]) -> list[dict[Column, Tensor]]:
    """The columns credit and loss ask for, under the weights as they are now: [M] on the CPU, per micro-batch."""

    def one(batch: Batch) -> dict[Column, Tensor]:
        scored: dict[Column, Tensor] = {}
        if "prox_logp" in columns:
            scored["prox_logp"] = trainer.forward(batch).logp.cpu()
        if "ref_logp" in columns:
            scored["ref_logp"] = trainer.forward_reference(batch).logp.cpu()
        return scored

    return [one(b) for b in micro]


@torch.no_grad()
def probe(trainer: Steppable, token_ids: list[int]) -> list[float]:
    """Log-probability, at temperature 1, of token_ids[1:] given what is before each."""
    n = len(token_ids)
    text = Sample(
        prompt=Prompt(id="probe", messages=[]),
        token_ids=token_ids,
        mask=[True] * n,
        rollout_logp=[0.0] * n,
        versions=[-1] * n,
    )
    batch = pack([text], [0.0]).to(trainer.device)
    return trainer.forward(batch, temperature=1.0).logp.tolist()


@dataclass
class Meter:
    """Averages per-token values with the token weights, over everything it is shown, on every rank."""

    weight: float = 0.0
    tokens: float = 0.0
    sums: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, tokens: Tokens, values: dict[str, Tensor]) -> None:
        self.weight += float(tokens.weight.double().sum())
        self.tokens += tokens.weight.numel()
        for name, v in values.items():
            weighted = (v.detach().double() * tokens.weight).sum()
            self.sums[name] = self.sums[name] + weighted if name in self.sums else weighted

    def merge(self, other: Meter) -> None:
        self.weight += other.weight
        self.tokens += other.tokens
        for name, total in other.sums.items():
            self.sums[name] = self.sums[name] + total if name in self.sums else total

    def means(self, trainer: Steppable) -> dict[str, float]:
        """Over all ranks; of what was never added there is no mean."""
        names = sorted(self.sums)
        local = torch.tensor([self.weight, self.tokens, *(float(self.sums[n]) for n in names)], dtype=torch.float64)
        weight, tokens, *sums = trainer.add_up(local).tolist()
        return {"tokens": tokens, **{n: s / weight for n, s in zip(names, sums, strict=True)}}
