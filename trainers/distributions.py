"""Distributions of frozen models that measures read in a trainer's forward passes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from configs.trainer_schema import LoraConfig, TrainerConfig
from core.errors import UserError
from core.types.measures import Measure, list_teachers
from core.types.samples import Batch, ScoredColumn
from modeling.forward import compute_states
from modeling.head import get_head
from modeling.layout_probe import layout_for
from modeling.sequence_parallel import SequenceGroup
from modeling.softmax import KeptStates, TeacherLogits
from trainers.learner import Learner


class Models(Protocol):
    """Models of a trainer rank, and how it reads them."""

    cfg: TrainerConfig
    lora: LoraConfig | None
    model: nn.Module
    policy: Learner
    frozen: dict[ScoredColumn, nn.Module]
    sequence_group: SequenceGroup | None

    def gather_parameter(self, parameter: Tensor) -> Tensor: ...


def keep_states(trainer: Models, batch: Batch, measures: Mapping[str, Measure]) -> dict[str, TeacherLogits]:
    """Run the frozen models that measures read; return functions that compute their logits from hidden states.

    Collective where models are sharded, so every rank calls it, with trained tokens or without.
    """
    return {name: _keep_states_of(trainer, batch, name).compute_logits for name in list_teachers(measures)}


def _keep_states_of(trainer: Models, batch: Batch, name: str) -> KeptStates:
    model = trainer.frozen.get(name)
    adapted: Any = trainer.model
    if model is None and (name != "ref_logp" or trainer.lora is None):
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
