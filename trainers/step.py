"""What every trainer is: one training step, and the measurements around it, over a few primitives.

backward(loss)             add to the gradient of this update
gradients_are_finite()     -> the same answer on every rank
update(lr=, apply=)        clip and step, or throw the gradient away; -> its norm
add_up(tensor)             -> the sum over ranks
weights(max_bytes)         -> every tensor once, whole, in buckets
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from algs.base import Algorithm
from configs.schema import ModelConfig, TrainerConfig
from core.errors import RunStopped
from core.types import Batch, Column, Policy, Prompt, Sample, Tokens
from data_feeds.packing import pack
from trainers.forward import forward, layout_for
from trainers.models import load_model
from trainers.optimizer import schedule_of


class Trainer:
    """One rank. Every method is called on all ranks at once, with as many micro-batches on each."""

    module: nn.Module
    """What is called in a forward pass: the model, or what wraps it."""

    def __init__(
        self,
        model: ModelConfig,
        cfg: TrainerConfig,
        alg: Algorithm,
        *,
        device: str,
        temperature: float,
        total_updates: int,
        reference: bool,
    ):
        self.device, self.cfg, self.alg, self.temperature = device, cfg, alg, temperature
        self.model = load_model(
            model.path,
            dtype=model.dtype,
            attention=model.attention,
            gradient_checkpointing=cfg.gradient_checkpointing,
        )
        self.reference = None
        if reference:  # the weights the run started from
            frozen = load_model(model.path, dtype=model.dtype, attention=model.attention)
            self.reference = frozen.requires_grad_(False).to(device)
        self.layout = layout_for(cfg.layout, self.model)
        self.schedule = schedule_of(cfg, total_updates)
        self.updates_done = self.skipped_in_a_row = 0

    def backward(self, loss: Tensor) -> None:
        raise NotImplementedError

    def gradients_are_finite(self) -> bool:
        raise NotImplementedError

    def update(self, *, lr: float, apply: bool) -> float:
        raise NotImplementedError

    def add_up(self, values: Tensor) -> Tensor:
        raise NotImplementedError

    def weights(self, max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        raise NotImplementedError

    def step(self, updates: list[list[Batch]]) -> dict[str, float]:
        """Make one optimizer update per inner list of micro-batches; returns metrics, the same on every rank.

        The metrics are of the updates that were made; one that is skipped is counted.
        """
        meter = Meter()
        norms: list[float] = []
        skipped = 0
        for micro in updates:
            this = Meter()
            for batch in self._with_totals(micro):
                policy = self.forward(batch)
                loss, metrics = self.alg.objective(policy, batch.tokens)
                check_per_token(self.alg, loss, metrics, batch.tokens)
                self.backward((loss * batch.tokens.weight).sum())
                this.add(batch.tokens, {"loss": loss, **metrics})
            norm = self.update(lr=self.schedule.at(self.updates_done), apply=self.gradients_are_finite())
            finite = math.isfinite(norm)  # the same on every rank
            if finite:
                meter.merge(this)
                norms.append(norm)
            self.updates_done += 1
            self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
            skipped += not finite
            if self.skipped_in_a_row >= self.cfg.max_skipped_updates:
                raise RunStopped(
                    f"{self.skipped_in_a_row} updates in a row had a gradient that is not finite: "
                    "the model or the loss diverged (trainer.max_skipped_updates says how many are borne)"
                )
        return {
            **meter.means(self),
            **({"grad_norm": sum(norms) / len(norms)} if norms else {}),
            "lr": self.schedule.at(self.updates_done - 1),
            "updates_skipped": float(skipped),
        }

    @torch.no_grad()
    def measure(self, micro: list[Batch]) -> dict[str, float]:
        """The metrics of an update without making it."""
        meter = Meter()
        for batch in self._with_totals(micro):
            loss, metrics = self.alg.objective(self.forward(batch), batch.tokens)
            meter.add(batch.tokens, {"loss": loss, **metrics})
        return meter.means(self)

    @torch.no_grad()
    def score(self, micro: list[Batch], columns: frozenset[Column]) -> list[dict[Column, Tensor]]:
        """The columns credit and loss ask for, under the weights as they are now: [M] on the CPU, per micro-batch."""

        def one(batch: Batch) -> dict[Column, Tensor]:
            scored: dict[Column, Tensor] = {}
            if "prox_logp" in columns:
                scored["prox_logp"] = self.forward(batch).logp.cpu()
            if "ref_logp" in columns:
                scored["ref_logp"] = self.forward_reference(batch).logp.cpu()
            return scored

        return [one(b.to(self.device)) for b in micro]

    @torch.no_grad()
    def probe(self, token_ids: list[int]) -> list[float]:
        """Log-probability, at temperature 1, of token_ids[1:] given what is before each."""
        n = len(token_ids)
        text = Sample(
            prompt=Prompt(id="probe", messages=[]),
            token_ids=token_ids,
            mask=[True] * n,
            rollout_logp=[0.0] * n,
            versions=[-1] * n,
        )
        return self.forward(pack([text], [0.0]).to(self.device), temperature=1.0).logp.tolist()

    def forward(self, batch: Batch, *, temperature: float | None = None) -> Policy:
        """What the model in training says, with gradient."""
        return forward(
            self.module,
            self.model,
            batch,
            layout=self.layout,
            temperature=temperature or self.temperature,
            entropy=self.alg.needs_entropy,
        )

    def forward_reference(self, batch: Batch) -> Policy:
        assert self.reference is not None
        return forward(self.reference, self.reference, batch, layout=self.layout, temperature=self.temperature)

    def state(self) -> Tensor:
        """All weights as one float32 vector on the CPU, for tests."""
        return torch.cat([t.flatten().float().cpu() for bucket in self.weights(2**28) for _, t in bucket])

    @torch.no_grad()
    def _with_totals(self, micro: list[Batch]) -> list[Batch]:
        """On this rank's device, with the algorithm's sums over the update, all its micro-batches and ranks."""
        micro = [b.to(self.device) for b in micro]
        if type(self.alg).totals is Algorithm.totals:
            return micro
        parts = [self.alg.totals(self.forward(b), b.tokens) for b in micro]
        totals = {name: self.add_up(torch.stack([p[name] for p in parts]).sum(0)) for name in sorted(parts[0])}
        return [replace(b, tokens=replace(b.tokens, totals=totals)) for b in micro]


def check_per_token(alg: Algorithm, loss: Tensor, metrics: dict[str, Tensor], tokens: Tokens) -> None:
    """A loss that reduced, or returned one value per sequence, must not be broadcast into a wrong result."""
    for name, value in {"the loss": loss, **metrics}.items():
        if value.shape != tokens.weight.shape:
            raise ValueError(
                f"{type(alg).__name__}: {name} has shape {list(value.shape)}, expected one value per learnt token, "
                f"{list(tokens.weight.shape)}: return it unreduced, the framework weighs and adds up"
            )


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

    def means(self, trainer: Trainer) -> dict[str, float]:
        """Over all ranks; of what was never added there is no mean."""
        names = sorted(self.sums)
        local = torch.tensor([self.weight, self.tokens, *(float(self.sums[n]) for n in names)], dtype=torch.float64)
        weight, tokens, *sums = trainer.add_up(local).tolist()
        return {"tokens": tokens, **{n: s / weight for n, s in zip(names, sums, strict=True)}}
