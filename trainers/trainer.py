"""What every trainer is: one training step, and the measurements around it, over learners.

A Learner is one model in training with its optimizer. The policy is one; where the algorithm needs values,
the value model is another; each moves by its own gradient, and an update counts as made when both did.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from algs.base import Algorithm, check_per_token
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.clock import Ledger
from core.errors import RunStopped
from core.types import Batch, Policy, Prompt, Sample, Scored
from data_feeds.packing import pack
from modeling.export import saved_parts
from modeling.forward import forward, layout_for, values_of
from modeling.load import load_model, load_scalar_model
from trainers.allocator import keep_freed_memory
from trainers.checkpoint_state import Counters, RankState, load_state, save_state
from trainers.learner import Learner
from trainers.meter import Meter
from trainers.optimizer import schedule_of
from weight_sync.base import Part


class Trainer:
    """One rank. Every method is called on all ranks at once, with as many micro-batches on each."""

    rank, ranks = 0, 1
    zero_stage: int | None = None
    """None: not partitioned."""

    def __init__(
        self,
        model: ModelConfig,
        cfg: TrainerConfig,
        alg: Algorithm,
        *,
        device: str,
        temperature: float,
        total_updates: int,
        sources: tuple[str, ...] = (),
        reference_ahead: bool = False,
    ):
        self.device, self.cfg, self.alg, self.temperature, self.sources = device, cfg, alg, temperature, sources
        self.ledger = Ledger("train", "logp", "sync", "save")
        if device == "cpu":
            keep_freed_memory()
        kind = {"dtype": model.dtype, "attention": model.attention}
        checkpointing = cfg.gradient_checkpointing
        self.lora = model.lora
        if alg.trains == "reward":
            self.policy = self.learner(load_scalar_model(model.path, **kind, gradient_checkpointing=checkpointing))
        else:
            policy = load_model(model.path, **kind, gradient_checkpointing=checkpointing, lora=model.lora)
            self.policy = self.learner(policy)
        self.critic: Learner | None = None
        if alg.value_lr is not None:
            self.critic = self.learner(load_scalar_model(model.path, **kind, gradient_checkpointing=checkpointing))
        self.frozen = {
            column: load_model(path or model.path, **kind).requires_grad_(False).to(device)
            for column, path in alg.frozen.items()
            # a reference may be scored already, and that of an adapter is the policy without it
            if path or not (reference_ahead or model.lora)
        }
        self.model = self.policy.model
        self.layout = layout_for(cfg.layout, self.model)
        self.schedule = schedule_of(cfg, total_updates)
        self.updates_done = self.skipped_in_a_row = 0

    def learner(self, model: nn.Module) -> Learner:
        raise NotImplementedError

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over ranks."""
        raise NotImplementedError

    def pads(self) -> bool:
        """Does any of the models take padded rows? Then micro-batches are to be cut for them."""
        models = [self.model, *self.frozen.values()]
        return any(layout_for(self.cfg.layout, m) == "padded" for m in models)

    def step(self, updates: list[list[Batch]]) -> dict[str, float]:
        """Make one optimizer update per inner list of micro-batches; returns metrics, the same on every rank.

        The metrics are of the updates that were made; one that is skipped is counted.
        """
        with self.ledger.doing("train"):
            return self._step(updates)

    def _step(self, updates: list[list[Batch]]) -> dict[str, float]:
        meter = Meter(self.sources)
        norms: list[dict[str, float]] = []
        for micro in updates:
            this = Meter(self.sources)
            for batch in self._with_totals(micro):
                loss, metrics = self._objective(batch)
                check_per_token(self.alg, loss, metrics, batch.tokens)
                self.policy.backward((loss * batch.tokens.weight).sum())
                if self.critic is not None:
                    metrics |= self._learn_values(self.critic, batch)
                this.add(batch.tokens, {"loss": loss, **metrics})
            if norm := self._update():
                meter.merge(this)
                norms.append(norm)
        return {
            **meter.means(self.add_up),
            **({name: sum(n[name] for n in norms) / len(norms) for name in norms[0]} if norms else {}),
            "lr": self.schedule.at(self.updates_done - 1),
            "updates_skipped": float(len(updates) - len(norms)),
        }

    def _objective(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        if self.alg.trains == "reward":
            values = values_of(self.policy.module, batch, layout=self.layout, model=self.model)
            return self.alg.value_loss(values, batch.tokens)
        return self.alg.objective(self.forward(batch), batch.tokens)

    def _learn_values(self, critic: Learner, batch: Batch) -> dict[str, Tensor]:
        values = values_of(critic.module, batch, layout=self.layout, model=critic.model)
        loss, metrics = self.alg.value_loss(values, batch.tokens)
        check_per_token(self.alg, loss, metrics, batch.tokens)
        critic.backward((loss * batch.tokens.weight).sum())
        return {"value/loss": loss, **metrics}

    def _update(self) -> dict[str, float]:
        """Move every learner whose gradient is finite; returns the norms, nothing if one was skipped."""
        lr = self.schedule.at(self.updates_done)
        learners = [("grad_norm", self.policy, lr)]
        if self.critic is not None and self.alg.value_lr is not None:
            learners.append(("value/grad_norm", self.critic, lr * self.alg.value_lr / self.cfg.lr))
        norms = {name: learner.update(lr=lr, apply=learner.gradients_are_finite()) for name, learner, lr in learners}
        finite = all(math.isfinite(n) for n in norms.values())  # the same on every rank
        self.updates_done += 1
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= self.cfg.max_skipped_updates:
            raise RunStopped(
                f"{self.skipped_in_a_row} updates in a row had a gradient that is not finite: "
                "the model or the loss diverged (trainer.max_skipped_updates says how many are borne)"
            )
        return norms if finite else {}

    @torch.no_grad()
    def measure(self, micro: list[Batch]) -> dict[str, float]:
        """The metrics of an update without making it."""
        meter = Meter()
        for batch in self._with_totals(micro):
            loss, metrics = self._objective(batch)
            meter.add(batch.tokens, {"loss": loss, **metrics})
        return meter.means(self.add_up)

    @torch.no_grad()
    def score(self, micro: list[Batch], columns: frozenset[Scored]) -> list[dict[Scored, Tensor]]:
        """The columns credit and loss ask for, under the weights as they are now: [M] on the CPU, per micro-batch."""

        def one(batch: Batch, column: Scored) -> Tensor:
            if column == "values":
                assert self.critic is not None
                return values_of(self.critic.module, batch, layout=self.layout, model=self.critic.model)
            if column == "prox_logp":
                return self.forward(batch).logp
            if column not in self.frozen:
                with self.model.disable_adapter():
                    return self.forward(batch).logp
            asked = self.frozen[column]
            layout = layout_for(self.cfg.layout, asked)
            return forward(asked, asked, batch, layout=layout, temperature=self.temperature).logp

        with self.ledger.doing("logp"):
            return [{c: one(b.to(self.device), c).cpu() for c in sorted(columns)} for b in micro]

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
        with self.ledger.doing("sync"):
            return self.forward(pack([text], [0.0]).to(self.device), temperature=1.0).logp.tolist()

    def forward(self, batch: Batch, *, temperature: float | None = None) -> Policy:
        """What the model in training says, with gradient."""
        return forward(
            self.policy.module,
            self.model,
            batch,
            layout=self.layout,
            temperature=temperature or self.temperature,
            entropy=self.alg.needs_entropy,
        )

    def weights(self, max_bytes: int, part: Part = "whole") -> Generator[list[tuple[str, Tensor]]]:
        """The policy's, for the engines; see Learner.weights."""
        return self.policy.weights(max_bytes, part)

    def gathered(self) -> dict[Part, dict[str, Tensor]]:
        """What is to be saved, on the CPU."""

        def one(part: Part) -> dict[str, Tensor]:
            return {name: t.to("cpu", copy=True) for bucket in self.weights(2**28, part) for name, t in bucket}

        return {part: one(part) for part in saved_parts(self.lora)}

    def state(self) -> Tensor:
        """All weights in training as one float32 vector on the CPU, for tests."""
        learners = [self.policy, *([self.critic] if self.critic is not None else [])]
        buckets = (bucket for learner in learners for bucket in learner.weights(2**28))
        return torch.cat([t.flatten().float().cpu() for bucket in buckets for _, t in bucket])

    def save_state(self, folder: Path) -> None:
        """This rank's share of a checkpoint, into a folder that all ranks see."""
        counters = Counters(updates_done=self.updates_done, skipped_in_a_row=self.skipped_in_a_row)
        with self.ledger.doing("save"):
            save_state(self._rank_state(), counters, folder)

    def load_state(self, folder: Path) -> None:
        counters = load_state(self._rank_state(), folder)
        self.updates_done, self.skipped_in_a_row = counters.updates_done, counters.skipped_in_a_row

    def _rank_state(self) -> RankState:
        return RankState(
            rank=self.rank,
            learners={"policy": self.policy} | ({"critic": self.critic} if self.critic is not None else {}),
            settings={
                "backend": "local" if self.zero_stage is None else "ray",
                "trainer.ranks": self.ranks,
                "trainer.zero_stage": self.zero_stage,
                "trainer.optimizer": self.cfg.optimizer,
            },
        )

    @torch.no_grad()
    def _with_totals(self, micro: list[Batch]) -> list[Batch]:
        """On this rank's device, with the algorithm's sums over the update, all its micro-batches and ranks."""
        micro = [b.to(self.device) for b in micro]
        if type(self.alg).totals is Algorithm.totals:
            return micro
        parts = [self.alg.totals(self.forward(b), b.tokens) for b in micro]
        totals = {name: self.add_up(torch.stack([p[name] for p in parts]).sum(0)) for name in sorted(parts[0])}
        return [replace(b, tokens=replace(b.tokens, totals=totals)) for b in micro]
