"""Models that see: where the parts of a vision-language model are, by family.

    pixels -> vision tower -> connector -> embeddings in place of the image's tokens -> language part -> head

Each part has its own attention. The tower's is not causal, so it never gets the kernel of the language part.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def in_tower(self, name: str) -> bool:
        """Tell whether a parameter is the vision tower's, without its connector."""
        return is_below(name, self.tower) and not any(is_below(name, c) for c in self.connectors)

    def in_vision(self, name: str) -> bool:
        """Tell whether a parameter is the vision tower's or its connector's."""
        return any(is_below(name, part) for part in (self.tower, *self.connectors))

    def in_language(self, name: str) -> bool:
        """Tell whether a module or parameter is the language part's."""
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
VISION_FAMILIES = {
    "idefics3": _IDEFICS,
    "qwen2_5_vl": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "smolvlm": _IDEFICS,
}
"""Vision-language models that are known here, by the model_type of their config: the one list of them. All are tested
in training and in rollouts."""


def is_below(name: str, module: str) -> bool:
    """Tell whether a dotted name is a module's, or of something below it.

    >>> is_below("model.visual.merger.ln_q.weight", "model.visual"), is_below("model.visual_proj", "model.visual")
    (True, False)
    """
    return name == module or name.startswith(f"{module}.")
