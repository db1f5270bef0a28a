"""Scoring by a trainer's models: columns of a step, and the frozen models that measures read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from algs.base import Algorithm
from algs.measures import PROX, MeasurePlan
from algs.teachers import LIVE
from configs.trainer_schema import LoraConfig, TrainerConfig
from core.errors import UserError
from core.types.arrays import Floats
from core.types.measures import Measure, list_teachers
from core.types.samples import Batch, Policy, ScoredColumn
from modeling.forward import compute_states, layout_for
from modeling.head import get_head
from modeling.sequence_parallel import SequenceGroup
from modeling.softmax import KeptStates, TeacherLogits
from trainers.learner import Learner
from trainers.references import Reference


class Models(Protocol):
    """Models of a trainer rank, and how it reads them."""

    cfg: TrainerConfig
    alg: Algorithm
    lora: LoraConfig | None
    model: nn.Module
    policy: Learner
    critic: Learner | None
    frozen: dict[str, nn.Module]
    references: dict[str, Reference]
    sequence_group: SequenceGroup | None

    @property
    def measures(self) -> MeasurePlan: ...

    def load_batch(self, batch: Batch) -> Batch: ...

    def forward(
        self, batch: Batch, *, frozen: nn.Module | None = None, measures: Mapping[str, Measure] | None = None
    ) -> Policy: ...

    def score_values(self, critic: Learner, batch: Batch) -> Tensor: ...

    def gather_parameter(self, parameter: Tensor) -> Tensor: ...


def score_columns(
    trainer: Models, micro_batches: list[Batch], columns: frozenset[ScoredColumn]
) -> list[dict[ScoredColumn, Floats]]:
    """Return columns under the current weights: arrays [M], per micro-batch."""
    models = group_by_model(columns - {*trainer.references})
    scored = [
        {column: values.cpu().numpy() for m, of in models.items() for column, values in _score(trainer, b, m, of)}
        for b in map(trainer.load_batch, micro_batches)
    ]
    for name in sorted(columns & {*trainer.references}):
        with trainer.references[name].in_place_of(trainer.policy):
            for batch, found in zip(map(trainer.load_batch, micro_batches), scored, strict=True):
                found[name] = trainer.forward(batch, measures={}).logp.cpu().numpy()
    return scored


def _score(trainer: Models, batch: Batch, model: str, columns: list[ScoredColumn]) -> list[tuple[ScoredColumn, Tensor]]:
    """Return the columns that a model computes in one forward pass, [M] each."""
    if model == "values":
        assert trainer.critic is not None
        return [(model, trainer.score_values(trainer.critic, batch))]
    of_model = trainer.measures.columns.get(model, {})
    measures = {column: of_model[column] for column in columns if column in of_model}
    if model == PROX or trainer.alg.teachers[model].model == LIVE:
        policy = trainer.forward(batch, measures=measures)
    elif model in trainer.frozen:
        policy = trainer.forward(batch, measures=measures, frozen=trainer.frozen[model])
    else:
        adapted: Any = trainer.model
        # LoRA: the base model without the adapter is the reference, so no second model is loaded
        with adapted.disable_adapter():
            policy = trainer.forward(batch, measures=measures)
    return [(column, policy.measures.get(column, policy.logp)) for column in columns]


def keep_states(trainer: Models, batch: Batch, measures: Mapping[str, Measure]) -> dict[str, TeacherLogits]:
    """Run the frozen models that measures read; return functions that compute their logits from hidden states.

    Collective where models are sharded, so every rank calls it, with trained tokens or without.
    """
    return {name: _keep_states_of(trainer, batch, name).compute_logits for name in list_teachers(measures)}


def _keep_states_of(trainer: Models, batch: Batch, name: str) -> KeptStates:
    model = trainer.frozen.get(name)
    adapted: Any = trainer.model
    if model is None and trainer.lora is None:
        raise UserError(
            f"a measure reads the distribution of {name!r}, and this run does not load that model: leave "
            "precompute_ref_logp out"
        )
    # LoRA: the base model without the adapter is the reference, so no second model is loaded
    with adapted.disable_adapter() if model is None else nullcontext():
        of_model = trainer.model if model is None else model
        hidden = compute_states(
            trainer.policy.module if model is None else model,
            of_model,
            batch,
            layout=layout_for(trainer.cfg.layout, of_model),
            sequence_group=trainer.sequence_group,
        )
    head = get_head(of_model)
    weight, bias = (None if p is None else trainer.gather_parameter(p) for p in (head.weight, head.bias))
    assert weight is not None
    return KeptStates(model=of_model, hidden=hidden, weight=weight, bias=bias)


def group_by_model(columns: frozenset[ScoredColumn]) -> dict[str, list[ScoredColumn]]:
    """Return the columns that one forward pass of a model computes, by the name of the model.

    >>> group_by_model(frozenset({"prox_logp", "prox.collision", "ref_logp"}))
    {'prox': ['prox.collision', 'prox_logp'], 'ref_logp': ['ref_logp']}
    """
    models: dict[str, list[ScoredColumn]] = {}
    # sorted: sharded models gather weights in every forward pass, so the order is the same on all ranks
    for column in sorted(columns):
        model = PROX if column == "prox_logp" else column.rpartition(".")[0] or column
        models.setdefault(model, []).append(column)
    return models
