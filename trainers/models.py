"""Model loading of a trainer: the policy, the value model and the frozen models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from algs.base import Algorithm
from algs.teachers import START
from configs.trainer_schema import ModelConfig, TrainerConfig
from modeling.freeze import check_scales, find_frozen, freeze
from modeling.load import load_model, load_scalar_model
from modeling.pretrained import Place


class ModelLoader:
    """Loader of the models in a recipe. Parameters that are not trained are already frozen."""

    def __init__(
        self,
        model: ModelConfig,
        cfg: TrainerConfig,
        alg: Algorithm,
        *,
        place: Place | None = None,
        place_frozen: Place | None = None,
    ):
        """place: shards an empty trained model before the weights are read; None reads it whole. place_frozen: the
        same for frozen models.
        """
        self.model, self.cfg, self.alg, self.place, self.place_frozen = model, cfg, alg, place, place_frozen
        self.kind: dict[str, Any] = {"dtype": model.dtype, "attention": model.attention}
        self.kind["trust_remote_code"] = model.trust_remote_code
        self.trained: dict[str, Any] = {**self.kind, "gradient_checkpointing": cfg.gradient_checkpointing}

    def load_policy(self) -> nn.Module:
        if self.alg.model_kind == "reward":
            return self.load_scalar()
        lora = self.model.lora
        freeze_parts = partial(self._freeze_parts, path=self.model.path)
        place = _place_after(freeze_parts if lora is None else _freeze, self.place)
        settings = {"lora": lora, "quantization": self.model.quantization, "place": place}
        policy = load_model(self.model.path, **self.trained, **settings)
        if lora is None:  # PEFT has frozen the rest
            freeze_parts(policy)
        self._check_scales(policy)
        return policy

    def _check_scales(self, model: nn.Module) -> None:
        frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        check_scales(model, self.cfg.lr_scales, frozen, images=self.model.images, path=self.model.path)

    def load_scalar(self) -> nn.Module:
        """Load a reward model, or the value model of a policy."""
        # A pattern may name the language-model head, which the policy has and its value model has not.
        is_checked = self.alg.model_kind == "reward" or self.model.lora is not None
        freeze_parts = partial(self._freeze_parts, path=self.model.path if is_checked else None)
        place = _place_after(freeze_parts, self.place)
        model = load_scalar_model(self.model.path, **self.trained, place=place)
        freeze_parts(model)
        if self.alg.model_kind == "reward":
            self._check_scales(model)
        return model

    def load_teachers(self, *, has_ref_logp: bool) -> Iterator[tuple[list[str], nn.Module]]:
        """Yield every frozen model once, with the names of its teachers. has_ref_logp: it is computed already.

        Teachers with weights of the policy need none: live ones, those that move, and the base model of an adapter.
        """
        by_path: dict[str, list[str]] = {}
        for name, teacher in self.alg.teachers.items():
            of_start = teacher.model == START and not (has_ref_logp or self.model.lora or teacher.moves)
            if teacher.path is not None or of_start:
                by_path.setdefault(teacher.path or self.model.path, []).append(name)
        for path, names in by_path.items():
            place = _place_after(_freeze, self.place_frozen)
            model = load_model(path, **self.kind, key=f"alg, the model of {names[0]}", place=place)
            yield names, model.requires_grad_(False)

    def _freeze_parts(self, model: nn.Module, *, path: str | None) -> None:
        """Freeze the parameters of `trainer.freeze`, and those that text never reaches. path: as in `find_frozen`."""
        freeze(model, find_frozen(model, self.cfg.freeze, images=self.model.images, path=path))


def _place_after(freeze: Callable[[nn.Module], None], place: Place | None) -> Place | None:
    """Return a function that freezes a model and then calls `place`."""
    if place is None:
        return None
    # freeze first: sharding chooses float32 for trained parameters and the dtype of the model for frozen parameters

    def freeze_and_place(model: nn.Module) -> None:
        freeze(model)
        place(model)

    return freeze_and_place


def _freeze(model: nn.Module) -> None:
    model.requires_grad_(False)
