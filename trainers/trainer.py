"""Base trainer: the training step over learners. Observers compute metrics and records.

A Learner is a model in training with an optimizer. The policy is a learner; so is the value model, if the algorithm
needs values. Each is updated by a separate gradient. An update counts as made when both were made.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from algs.base import Algorithm, Metrics
from algs.measures import MeasurePlan, plan_measures
from algs.objective import Objective, add_totals, compute_objective, view_first
from algs.totals import sum_totals
from algs.validate import check_per_token
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.allocator import keep_freed_memory
from core.errors import RunStopped, UserError, writing
from core.timing.clock import ActivityTimer
from core.timing.phases import TRAINER_ACTIVITIES, Activity
from core.types.allowed_tokens import EVERY_TOKEN, AllowedTokens
from core.types.arrays import Floats
from core.types.batch import RowLayout
from core.types.images import PlacedImage
from core.types.measures import Measure
from core.types.routes import RouterReplay
from core.types.samples import Batch, Policy, ScoredColumn
from core.types.weights import Bucket, ExportScope, SavedModel
from data_feeds.packing.batches import make_probe_batch
from modeling.export import saved_scopes
from modeling.forward import compute_values, forward
from modeling.layout_probe import layout_for
from modeling.load import DTYPES
from modeling.media import MediaLoader
from modeling.route_counts import RouteReplay
from modeling.sequence_parallel import SequenceGroup
from modeling.text_use import leave_out, list_unused
from trainers.checkpoint.state import RankState, estimate_bytes, load_state, save_state
from trainers.columns import score_columns
from trainers.compiled import compile_blocks
from trainers.distributions import keep_states
from trainers.layouts import combine_layouts, measure_layouts
from trainers.learner import Learner
from trainers.meter import Meter, StepMetrics
from trainers.models import ModelLoader
from trainers.observers import BatchSeen, ObserverFactory, Observers
from trainers.offload.offloaded_trainer import OffloadedTrainer
from trainers.optimizer import make_lr_schedule
from trainers.references import AVERAGE, Reference
from trainers.routes import RouteMetrics
from trainers.utilization import Utilization


class Trainer:
    """Train on one rank. Every method is called on all ranks at once, with the same number of micro-batches on each."""

    rank, ranks = 0, 1
    offloaded: OffloadedTrainer
    """Offloading to the CPU, with `placement: colocate`."""
    sequence_group: SequenceGroup | None = None
    """Sequence-parallel group of this rank; None without sequence parallelism."""

    def __init__(
        self,
        model: ModelConfig,
        cfg: TrainerConfig,
        alg: Algorithm,
        *,
        device: str,
        temperature: float,
        total_updates: int,
        allowed_tokens: AllowedTokens = EVERY_TOKEN,
        has_ref_logp: bool = False,
        router_replay: RouterReplay = "off",
        observers: Mapping[str, ObserverFactory] = MappingProxyType({}),
    ):
        """Load the models and make the learners; see TrainerSettings.

        total_updates: updates of the whole run, for the learning rate. observers: factories by their recipe key.
        """
        self.device, self.cfg, self.temperature = device, cfg, temperature
        self.set_algorithm(alg)
        self.allowed_tokens = allowed_tokens
        self.timer = ActivityTimer(*TRAINER_ACTIVITIES)
        routed: dict[str, ObserverFactory] = {} if router_replay == "off" else {"routes": RouteMetrics}
        asked: dict[str, ObserverFactory] = {"metrics": StepMetrics, "utilization": Utilization, **routed, **observers}
        self.observers = Observers({key: make(self) for key, make in asked.items()})
        if device == "cpu":
            keep_freed_memory()  # before any model is loaded: only later allocations profit
        self.lora, self.images, self.saved_scopes = model.lora, model.images, saved_scopes(model)
        models = self.make_loader(model, alg)
        self.policy = self.make_learner(models.load_policy())
        self.critic: Learner | None = None if alg.value_lr is None else self.make_learner(models.load_scalar())
        self.frozen: dict[str, nn.Module] = {}
        for names, model_of_them in models.load_teachers(has_ref_logp=has_ref_logp):
            self.frozen |= dict.fromkeys(names, self.hold_frozen(model_of_them))
        moving = [name for name, t in alg.teachers.items() if t.moves] + ([] if cfg.ema is None else [AVERAGE])
        self.references = {name: Reference(self.policy) for name in moving}
        self.model = self.policy.model
        kind: dict[str, Any] = {"dtype": DTYPES[model.dtype], "trust_remote_code": model.trust_remote_code}
        self.media = MediaLoader(self.model, model.path, device=device, images=model.images, **kind)
        measure_layouts(model, self.policy, self.critic, self.frozen, cfg, agree=self.find_largest, device=device)
        if cfg.compile:
            compile_blocks(self.list_models())
        self.layout = layout_for(cfg.layout, self.model)
        self.routes: RouteReplay | None = None
        if router_replay != "off":
            forces = router_replay == "replay"
            self.routes = RouteReplay(self.policy.module, self.model, forces=forces, device=device)
        self.get_lr = make_lr_schedule(cfg, total_updates)
        self.updates_done = self.skipped_in_a_row = 0

    def make_loader(self, model: ModelConfig, alg: Algorithm) -> ModelLoader:
        return ModelLoader(model, self.cfg, alg)

    def make_learner(self, model: nn.Module) -> Learner:
        raise NotImplementedError

    def get_file_settings(self) -> dict[str, Any]:
        """Return the recipe keys, with values, that determine the checkpoint format."""
        return {"backend": "local", "trainer.ranks": 1}

    def hold_frozen(self, model: nn.Module) -> nn.Module:
        """Return a frozen model on this rank's device."""
        return model.to(self.device)

    def gather_parameter(self, parameter: Tensor) -> Tensor:
        """Return a whole parameter of a model, without gradient, for reading. Collective where it is sharded."""
        return parameter.detach()

    def sum_over_rows(self, values: Tensor) -> Tensor:
        """Return `values`, computed from this rank's rows, summed over all rows; the same on every rank."""
        raise NotImplementedError

    def save_model(self, folder: Path, which: SavedModel = "policy") -> list[str]:
        """Write a model in Hugging Face format, a value model as a classifier of one label; return corrections."""
        learner = self.critic if which == "value" else self.policy
        assert learner is not None
        average = self.references[AVERAGE].in_place_of(learner) if which == "ema" else nullcontext()
        needs = partial(estimate_bytes, [learner])
        with self.timer.measure(Activity.SAVE), writing(folder, needs=needs), average:
            return self.write_model(learner, folder, ["whole"] if which == "value" else self.saved_scopes)

    def write_model(self, learner: Learner, folder: Path, scopes: list[ExportScope]) -> list[str]:
        """Gather the tensors of `scopes` and write them from a single rank; return as `save_model` does."""
        raise NotImplementedError

    def describe_layout(self) -> RowLayout:
        """Return the row layout that all models support."""
        return combine_layouts(self.model, self.list_models()[1:], self.cfg, images=self.images)

    def find_largest(self, value: Tensor) -> Tensor:
        """Return the largest `value` of all ranks, on every rank."""
        return value

    def set_algorithm(self, alg: Algorithm) -> None:
        """Use another copy of the algorithm from now on: the next step's, with its state and schedules."""
        self.alg = alg
        self.measures: MeasurePlan = plan_measures(alg)  # once, and not in every forward pass

    def list_models(self) -> list[nn.Module]:
        return [self.model, *self.frozen.values(), *([self.critic.model] if self.critic is not None else [])]

    def step(self, updates: list[list[Batch]]) -> dict[str, float]:
        """Update the weights once per list of micro-batches that is not empty; return metrics, equal on every rank.

        The metrics are averages over the updates that were made; a skipped update is only counted.
        """
        with self.timer.measure(Activity.TRAIN):
            self.observers.begin_step()
            for micro_batches in filter(None, updates):
                self.observers.begin_update()
                for batch in self.with_totals(micro_batches):
                    with torch.set_grad_enabled(self.alg.trains_policy):
                        policy, found = self._compute_loss(batch)
                    if self.alg.trains_policy:
                        self._backward(self.policy, found.loss, batch)
                    if self.critic is not None:
                        value_loss, of_values = self._compute_value_loss(self.critic, batch)
                        self._backward(self.critic, value_loss, batch)
                        found.metrics |= {"value/loss": value_loss, **of_values}
                    self.observers.on_batch(BatchSeen.detached(batch, policy, found))
                self.observers.on_update(self._update_weights())
            self.updates_done += updates.count([])  # the schedule goes on without those that train nothing
            return self.observers.finish() | {"lr": self.get_lr(self.updates_done - 1)}

    def _compute_loss(self, batch: Batch) -> tuple[Policy | None, Objective]:
        """Run the forward pass; return the policy (None for a reward model), and the objective."""
        if self.alg.model_kind == "reward":
            return None, Objective.of_loss(self.alg, self._compute_value_loss(self.policy, batch), batch.tokens)
        policy = self.forward(batch)
        if batch.terms:
            return policy, compute_objective(self.alg, policy, batch)
        return policy, Objective.of_loss(self.alg, self.alg.objective(policy, batch.tokens), batch.tokens)

    def _compute_value_loss(self, learner: Learner, batch: Batch) -> tuple[Tensor, Metrics]:
        """Run the forward pass of a value or reward model; return the loss [M] and the metrics."""
        returned = self.alg.value_loss(self.compute_values_of(learner, batch), batch.tokens)
        return check_per_token(self.alg, returned, batch.tokens)

    def _backward(self, learner: Learner, loss: Tensor, batch: Batch) -> None:
        """Add the gradient of the weighted loss to that of the update."""
        if not loss.requires_grad:
            raise UserError(
                f"{type(self.alg).__name__}: the loss has no gradient: compute it from policy.logp (or values), "
                "without detach()"
            )
        learner.backward((loss * batch.tokens.weight).sum())

    def _update_weights(self) -> dict[str, float]:
        """Update every learner, or none if a gradient is not finite; return the gradient norms, {} if skipped."""
        lr = self.get_lr(self.updates_done)
        learners = [("grad_norm", self.policy, lr)] if self.alg.trains_policy else []
        if self.critic is not None and self.alg.value_lr is not None:
            # the ratio value_lr / lr is constant, so that the critic follows the policy's warm-up and decay
            learners.append(("value/grad_norm", self.critic, lr * self.alg.value_lr / self.cfg.lr))
        are_finite = [learner.has_finite_gradients() for _, learner, _ in learners]  # every call is a collective
        norms = {name: learner.update(lr=lr, apply=all(are_finite)) for name, learner, lr in learners}
        finite = all(math.isfinite(n) for n in norms.values())  # the same on every rank
        if finite and self.cfg.ema is not None:
            self.references[AVERAGE].move(self.policy, 1 - self.cfg.ema)
        self.updates_done += 1
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= self.cfg.max_skipped_updates:
            raise RunStopped(
                f"{self.skipped_in_a_row} updates in a row had a gradient that is not finite: the model or the loss "
                "diverged; lower trainer.lr, or allow more such updates with trainer.max_skipped_updates"
            )
        return norms if finite else {}

    @torch.no_grad()
    def measure_loss(self, micro_batches: list[Batch]) -> dict[str, float]:
        """Return the loss and metrics of micro-batches without an update."""
        meter = Meter()
        for batch in self.with_totals(micro_batches):
            meter.add_objective(batch.tokens.weight, self._compute_loss(batch)[1])
        return meter.compute_means(self.sum_over_rows)

    @torch.no_grad()
    def compute_columns(
        self, micro_batches: list[Batch], columns: frozenset[ScoredColumn]
    ) -> list[dict[ScoredColumn, Floats]]:
        """Return the columns that an algorithm requires, under the current weights: arrays [M], per micro-batch."""
        with self.timer.measure(Activity.LOGP):
            return score_columns(self, micro_batches, columns)

    def move_teachers(self, rates: dict[str, float]) -> None:
        """Move the teachers that follow the policy by a share of the way, by name; 1 is a reset."""
        with self.timer.measure(Activity.TRAIN):
            for name, rate in sorted(rates.items()):
                self.references[name].move(self.policy, rate)
                if rate == 1 and self.alg.teachers[name].with_optimizer:
                    self.policy.clear_moments()

    def load(self, batch: Batch) -> Batch:
        """Return the batch on the device. Raises RunStopped for a trained token that the policy may not choose."""
        self.allowed_tokens.check_labels(batch.labels)  # on the host, which would wait for a device's answer
        if batch.kept is not None:
            batch.kept.check_labels(batch.labels)
        return self.media.load(batch)

    def compute_values_of(self, critic: Learner, batch: Batch) -> Tensor:
        together = self.sequence_group
        return compute_values(critic.module, batch, layout=self.layout, model=critic.model, sequence_group=together)[0]

    @torch.no_grad()
    def probe(self, token_ids: list[int], images: Sequence[PlacedImage] = ()) -> list[float]:
        """Return the log-probability, at temperature 1, of each token of text after the first, given what is before."""
        with self.timer.measure(Activity.SYNC):
            batch = self.media.load(make_probe_batch(token_ids, images))
            return self.forward(batch, as_given=True, measures={}).logp.tolist()

    def forward(
        self,
        batch: Batch,
        *,
        frozen: nn.Module | None = None,
        as_given: bool = False,
        measures: Mapping[str, Measure] | None = None,
    ) -> Policy:
        """Run the model in training, with gradient, or a frozen one.

        as_given: at temperature 1 and over all tokens, instead of the run's temperature and allowed_tokens. measures:
        those to compute; None: those of the loss.
        """
        plan = self.measures
        measures = plan.live if measures is None else measures
        return forward(
            self.policy.module if frozen is None else frozen,
            self.model if frozen is None else frozen,
            batch,
            layout=self.layout if frozen is None else layout_for(self.cfg.layout, frozen),
            temperature=1.0 if as_given else self.temperature,
            logits_mib=self.cfg.logits_mib,
            allowed_tokens=EVERY_TOKEN if as_given else self.allowed_tokens,
            sequence_group=self.sequence_group,
            measures=measures,
            teachers=keep_states(self, batch, measures),
            measured=plan.any,
            replay=self.routes if frozen is None else None,
        )

    def export_weights(self, max_bytes: int, scope: ExportScope = "whole") -> Generator[Bucket]:
        """Yield the tensors of the policy that engines have; see Learner.export_weights."""
        return leave_out(self.policy.export_weights(max_bytes, scope), list_unused(self.model, self.images))

    def flatten_weights(self) -> Tensor:
        """Return all trained weights as a flat float32 vector on the CPU, for tests."""
        buckets = (bucket for own in (self.policy, self.critic) if own for bucket in own.export_weights(2**28))
        return torch.cat([t.flatten().float().cpu() for bucket in buckets for _, t in bucket])

    def save_state(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint into a folder on a shared file system."""
        state = self._rank_state()
        needs = partial(estimate_bytes, state.learners.values(), ranks=state.ranks, has_optimizer=True)
        with self.timer.measure(Activity.SAVE), writing(folder, needs=needs):
            save_state(state, folder)

    def load_state(self, folder: Path) -> None:
        """Restore the state that `save_state` wrote."""
        self.updates_done, self.skipped_in_a_row = load_state(self._rank_state(), folder)

    def _rank_state(self) -> RankState:
        return RankState(
            rank=self.rank,
            ranks=self.ranks,
            updates_done=self.updates_done,
            skipped_in_a_row=self.skipped_in_a_row,
            references=self.references,
            learners={"policy": self.policy} | ({"critic": self.critic} if self.critic is not None else {}),
            settings={**self.get_file_settings(), "trainer.optimizer": self.cfg.optimizer},
        )

    def with_totals(self, micro_batches: list[Batch]) -> Generator[Batch]:
        """Yield the batches on the device, with the algorithm's totals over the whole update and all ranks."""
        # loaded lazily: the pixels of a whole update may take more memory than the tokens
        with torch.no_grad():
            seen = (view_first(self.forward(batch), batch) for batch in map(self.load, micro_batches))
            totals = sum_totals(self.alg, seen, self)
        for batch, own in zip(map(self.load, micro_batches), totals, strict=False):  # without end if there are none
            yield add_totals(batch, own)
