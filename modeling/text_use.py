"""Text use of a model that also reads images or sound: as model.images asks, or for a family that is not known here.

transformers loads some of them as the language part alone (Qwen3.5), and others whole (Gemma 3, Mistral 3). Parts that
text never reaches are frozen and not sent to engines, which do not have them, and they are saved with the rest.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn

from core.types.weights import Bucket
from modeling.hf_config import ImageUse, is_text_use


def list_unused(model: nn.Module, images: ImageUse = "auto") -> list[str]:
    """Return the names of parameters and buffers that no input reaches.

    With images these are the ones for sound, else all but text's.
    """
    wrapped: Any = model
    base: Any = wrapped.get_base_model() if hasattr(model, "peft_config") else wrapped
    if not is_text_use(base.config, images):
        # rows have images, but never sound
        sound = getattr(base.config, "audio_config", None) is not None
        return [name for name, _ in _list_tensors(base) if sound and "audio" in name]
    parts = (base.get_decoder(), base.get_output_embeddings())
    used = {id(tensor) for part in parts if part is not None for _, tensor in _list_tensors(part)}
    return [name for name, tensor in _list_tensors(base) if id(tensor) not in used]


def _list_tensors(module: nn.Module) -> chain[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def leave_out(buckets: Iterable[Bucket], names: Iterable[str]) -> Generator[Bucket]:
    """Yield the buckets without tensors of these names, which model files may write without `model.` before them."""
    out = {form for name in names for form in (name, name.removeprefix("model."))}
    for bucket in buckets:
        if kept := [(name, tensor) for name, tensor in bucket if name not in out]:
            yield kept
