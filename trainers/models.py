"""Models of a trainer as they are loaded: the policy, a value model, and frozen models beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from algs.base import Algorithm
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.errors import UserError
from core.types.samples import ScoredColumn
from modeling.hf_config import vision_family
from modeling.load import load_model, load_scalar_model
from modeling.pretrained import Place


class ModelLoader:
    """Loads what a recipe names; what the recipe does not train is frozen already."""

    def __init__(
        self,
        model: ModelConfig,
        cfg: TrainerConfig,
        alg: Algorithm,
        *,
        place: Place | None = None,
        place_frozen: Place | None = None,
    ):
        """place: shards an empty model that is trained before it is filled, place_frozen one that is not; None loads
        it whole.
        """
        self.model, self.cfg, self.alg, self.place, self.place_frozen = model, cfg, alg, place, place_frozen
        self.kind: dict[str, Any] = {"dtype": model.dtype, "attention": model.attention}
        self.trusts = model.trust_remote_code

    def load_policy(self) -> nn.Module:
        if self.alg.model_kind == "reward":
            return self.load_scalar()
        lora = self.model.lora
        freeze = self._freeze_vision if lora is None else _freeze
        own: dict[str, Any] = {"gradient_checkpointing": self.cfg.gradient_checkpointing, "lora": lora}
        own["place"] = _place_after(freeze, self.place)
        policy = load_model(self.model.path, **self.kind, **own, trust_remote_code=self.trusts)
        if lora is None:  # PEFT has frozen the rest
            self._freeze_vision(policy)
        return policy

    def load_scalar(self) -> nn.Module:
        """Load a reward model, or the value model of a policy."""
        own: dict[str, Any] = {"gradient_checkpointing": self.cfg.gradient_checkpointing}
        own["place"] = _place_after(self._freeze_vision, self.place)
        model = load_scalar_model(self.model.path, **self.kind, **own, trust_remote_code=self.trusts)
        self._freeze_vision(model)
        return model

    def load_frozen(self, *, has_ref_logp: bool) -> Iterator[tuple[ScoredColumn, nn.Module]]:
        """Yield the models that score columns. has_ref_logp: the reference is computed already."""
        for column, path in self.alg.frozen_models.items():
            if path or not (has_ref_logp or self.model.lora):  # the reference of an adapter is the policy without it
                yield column, self._load_frozen(column, path)

    def _load_frozen(self, column: str, path: str) -> nn.Module:
        """Load the model that scores a column; no path is the model in training, as it was."""
        place = _place_after(_freeze, self.place_frozen)
        own: dict[str, Any] = {"key": f"alg, the model of {column}", "place": place}
        model = load_model(path or self.model.path, **self.kind, **own, trust_remote_code=self.trusts)
        return model.requires_grad_(False)

    def _freeze_vision(self, model: nn.Module) -> None:
        """Take the vision tower out of training; its connector, which speaks to the language part, stays in."""
        if self.cfg.vision != "frozen":
            return
        own: Any = model
        parts = vision_family(own.config)
        if parts is None:
            raise UserError("trainer.vision is frozen, and model.path is a text model: leave trainer.vision out")
        for name, parameter in model.named_parameters():
            if parts.in_tower(name):
                parameter.requires_grad_(False)


def _place_after(freeze: Callable[[nn.Module], None], place: Place | None) -> Place | None:
    """Return `place`, after what is not trained was frozen: it is kept in another dtype."""
    if place is None:
        return None

    def freeze_and_place(model: nn.Module) -> None:
        freeze(model)
        place(model)

    return freeze_and_place


def _freeze(model: nn.Module) -> None:
    model.requires_grad_(False)
