"""Models that see: where the parts of a vision-language model are, by family.

    pixels -> vision tower -> connector -> embeddings in place of the image's tokens -> language part -> head

Each part has its own attention. The tower's is not causal, so it never gets the kernel of the language part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from core.errors import UserError, quote
from modeling.images.families import Patches, Tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """Reader of images of a family's models, and the names of their parts below the language-model head."""

    images: type[Tiles] | type[Patches]
    """How an image becomes tokens and tensors."""
    tower: str
    """Module that turns pixels into features."""
    connectors: tuple[str, ...]
    """Modules that turn features into embeddings of tokens; they may lie inside the tower's module."""
    language: str


_IDEFICS = VisionFamily(
    images=Tiles, tower="model.vision_model", connectors=("model.connector",), language="model.text_model"
)
_QWEN = VisionFamily(
    images=Patches,
    tower="model.visual",
    connectors=("model.visual.merger", "model.visual.deepstack_merger_list"),
    language="model.language_model",
)
VISION_FAMILIES = {
    "idefics3": _IDEFICS,
    "qwen2_5_vl": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "smolvlm": _IDEFICS,
}
"""Vision-language models that are known here, by the model_type of their config: the one list of them. All are tested
in training and in rollouts."""


def find_vision(config: Any, *, path: str, key: str = "model.path") -> VisionFamily | None:
    """Return the parts of a model that reads images; None for a text model.

    Raises UserError for a model that reads images and is of no known family.
    """
    known = VISION_FAMILIES.get(config.model_type)
    if known is None and getattr(config, "vision_config", None) is not None:
        raise UserError(
            f"{key}={quote(path)} is a {config.model_type} model, which reads images, and of such models these are "
            f"known here: {', '.join(sorted(VISION_FAMILIES))}: take one of them, or a text model"
        )
    return known


def parts_of(model: nn.Module) -> VisionFamily | None:
    """Return the parts of a loaded model, whatever adapter wraps it; None for a text model."""
    config: Any = model.config
    return VISION_FAMILIES.get(config.model_type)


def choose_class(config: Any, *, path: str, key: str = "model.path") -> Any:
    """Return the class of transformers that loads a model with a language-model head."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if find_vision(config, path=path, key=key) is None else AutoModelForImageTextToText


def freeze_tower(model: nn.Module) -> None:
    """Take the vision tower out of training; its connector, which speaks to the language part, stays in."""
    parts = parts_of(model)
    if parts is None:
        raise UserError("trainer.vision is frozen, and model.path is a text model: leave trainer.vision out")
    for name, parameter in model.named_parameters():
        if in_tower(name, parts):
            parameter.requires_grad_(False)


def in_tower(name: str, parts: VisionFamily) -> bool:
    """Tell whether a parameter is the vision tower's, without its connector."""
    return is_below(name, parts.tower) and not any(is_below(name, c) for c in parts.connectors)


def in_vision(name: str, parts: VisionFamily) -> bool:
    """Tell whether a parameter is the vision tower's or its connector's."""
    return any(is_below(name, part) for part in (parts.tower, *parts.connectors))


def is_below(name: str, module: str) -> bool:
    """Tell whether a dotted name is a module's, or of something below it.

    >>> is_below("model.visual.merger.ln_q.weight", "model.visual"), is_below("model.visual_proj", "model.visual")
    (True, False)
    """
    return name == module or name.startswith(f"{module}.")
