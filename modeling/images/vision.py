"""Vision-language families: module names of vision tower, connector and language part.

    pixels -> vision tower -> connector -> embeddings in place of the image's tokens -> language part -> head

Each part has its own attention. The tower's is not causal, so it never uses the kernel of the language part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from modeling.images.families import Patches, Tiles
from modeling.images.gemma import Pools, Squares

ImageFamily = Tiles | Patches | Squares | Pools


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """Image handling and module names of a model family."""

    images: type[ImageFamily]
    """Conversion of an image to tokens and tensors."""
    tower: str
    """Module from pixels to features."""
    connectors: tuple[str, ...]
    """Modules from features to token embeddings, possibly inside the tower's module."""
    language: str

    def in_tower(self, name: str) -> bool:
        """Tell whether a parameter belongs to the vision tower, connector excluded."""
        return is_below(name, self.tower) and not any(is_below(name, c) for c in self.connectors)

    def in_vision(self, name: str) -> bool:
        """Tell whether a parameter belongs to the vision tower or the connector."""
        return any(is_below(name, part) for part in (self.tower, *self.connectors))

    def in_language(self, name: str) -> bool:
        """Tell whether a module or parameter belongs to the language part."""
        return is_below(name, self.language)


_IDEFICS = VisionFamily(
    images=Tiles, tower="model.vision_model", connectors=("model.connector",), language="model.text_model"
)
_QWEN = VisionFamily(
    images=Patches,
    tower="model.visual",
    connectors=("model.visual.merger", "model.visual.deepstack_merger_list"),
    language="model.language_model",
)
_GEMMA = VisionFamily(
    images=Squares,
    tower="model.vision_tower",
    connectors=("model.multi_modal_projector",),
    language="model.language_model",
)
VISION_FAMILIES = {
    "gemma3": _GEMMA,
    "gemma4": replace(_GEMMA, images=Pools, connectors=("model.embed_vision",)),
    "idefics3": _IDEFICS,
    "qwen2_5_vl": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen3_5": replace(_QWEN, connectors=("model.visual.merger",)),
    "qwen3_vl": _QWEN,
    "smolvlm": _IDEFICS,
}
"""Supported vision-language models by the config's model_type, all tested in training and rollouts."""


def is_below(name: str, module: str) -> bool:
    """Tell whether a dotted name is a module's or below it.

    >>> is_below("model.visual.merger.ln_q.weight", "model.visual"), is_below("model.visual_proj", "model.visual")
    (True, False)
    """
    return name == module or name.startswith(f"{module}.")
