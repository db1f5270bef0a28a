"""Columns of a step: log-probabilities, values and measures that a trainer computes before the advantages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor, nn

from algs.base import Algorithm
from algs.measures import PROX, MeasurePlan
from algs.teachers import LIVE
from core.types.arrays import Floats
from core.types.measures import Measure
from core.types.samples import Batch, Policy, ScoredColumn
from trainers.learner import Learner
from trainers.references import Reference


class Scorer(Protocol):
    """Trainer rank, as far as its models score tokens."""

    alg: Algorithm
    policy: Learner
    critic: Learner | None
    model: Any
    frozen: dict[str, nn.Module]
    references: dict[str, Reference]
    measures: MeasurePlan

    def load(self, batch: Batch) -> Batch: ...
    def forward(
        self, batch: Batch, *, frozen: nn.Module | None = None, measures: Mapping[str, Measure] | None = None
    ) -> Policy: ...
    def compute_values_of(self, critic: Learner, batch: Batch) -> Tensor: ...


def score_columns(
    trainer: Scorer, micro_batches: list[Batch], columns: frozenset[ScoredColumn]
) -> list[dict[ScoredColumn, Floats]]:
    """Compute columns under the current weights: arrays [M], per micro-batch."""
    models = group_by_model(columns, trainer.alg.teachers)
    resting = [(model, of) for model, of in models.items() if model not in trainer.references]
    batches = map(trainer.load, micro_batches)
    scored = [{c: v for model, of in resting for c, v in _score(trainer, batch, model, of)} for batch in batches]
    for name in sorted(trainer.references.keys() & models.keys()):
        with trainer.references[name].in_place_of(trainer.policy):
            for batch, found in zip(map(trainer.load, micro_batches), scored, strict=True):
                found.update(_score(trainer, batch, name, models[name]))
    return scored


def _score(trainer: Scorer, batch: Batch, model: str, columns: list[ScoredColumn]) -> list[tuple[ScoredColumn, Floats]]:
    """Compute the columns of a model in one forward pass, [M] each."""
    if model == "values":
        assert trainer.critic is not None
        return [(model, trainer.compute_values_of(trainer.critic, batch).cpu().numpy())]
    of_model = trainer.measures.columns.get(model, {})
    measures = {column: of_model[column] for column in columns if column in of_model}
    if model != PROX:
        batch = replace(batch, routes=None)  # other models, or weights, choose for themselves
    if model == PROX or model in trainer.references or trainer.alg.teachers[model].model == LIVE:
        policy = trainer.forward(batch, measures=measures)
    elif model in trainer.frozen:
        policy = trainer.forward(batch, measures=measures, frozen=trainer.frozen[model])
    else:
        # LoRA: the base model without the adapter is the reference, so no second model is loaded
        with trainer.model.disable_adapter():
            policy = trainer.forward(batch, measures=measures)
    return [(column, policy.measures.get(column, policy.logp).cpu().numpy()) for column in columns]


def group_by_model(columns: frozenset[ScoredColumn], teachers: Collection[str]) -> dict[str, list[ScoredColumn]]:
    """Return the columns that one forward pass of a model computes, by the name of the model.

    >>> group_by_model(frozenset({"prox_logp", "prox.collision", "ref_logp"}), ["ref_logp"])
    {'prox': ['prox.collision', 'prox_logp'], 'ref_logp': ['ref_logp']}
    """
    models: dict[str, list[ScoredColumn]] = {}
    # sorted: sharded models gather weights in every forward pass, so the order is the same on all ranks
    for column in sorted(columns):
        # a teacher's name may have a dot, as that of its data set; other dots separate a model and its measure
        of_measure = column if column in teachers else column.rpartition(".")[0]
        model = PROX if column == "prox_logp" else of_measure or column
        models.setdefault(model, []).append(column)
    return models
