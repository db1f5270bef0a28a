"""Text use of a model that also reads images or sound, of a family that is not known here (modeling/images/vision.py).

transformers loads some of them as the language part alone (Qwen3.5), and others whole (Gemma 3, Mistral 3). What text
never reaches is frozen and not sent to engines, which do not have it, and it is saved with the rest.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

from torch import nn

from core.types.weights import Bucket
from modeling.hf_config import is_text_use


def freeze_unused(model: nn.Module) -> None:
    """Freeze the parts that text never reaches, such as a vision tower."""
    unused = {*list_unused(model)}
    for name, parameter in model.named_parameters():
        if name in unused:
            parameter.requires_grad_(False)


def list_unused(model: nn.Module) -> list[str]:
    """Return the names of parameters that text never reaches; [] for a text model and for a known family."""
    wrapped: Any = model
    base: Any = wrapped.get_base_model() if hasattr(model, "peft_config") else wrapped
    if not is_text_use(base.config):
        return []
    parts = (base.get_decoder(), base.get_output_embeddings())
    used = {id(p) for part in parts if part is not None for p in part.parameters()}
    return [name for name, p in base.named_parameters() if id(p) not in used]


def leave_out(buckets: Iterable[Bucket], names: Iterable[str]) -> Generator[Bucket]:
    """Yield the buckets without tensors of these names, which model files may write without `model.` before them."""
    out = {form for name in names for form in (name, name.removeprefix("model."))}
    for bucket in buckets:
        if kept := [(name, tensor) for name, tensor in bucket if name not in out]:
            yield kept
