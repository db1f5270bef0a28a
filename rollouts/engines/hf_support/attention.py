"""Attention kernel of the engine hf."""

from __future__ import annotations

from typing import Any

from torch import nn


def attend_with_cache(model: nn.Module) -> None:
    """Use torch's scaled_dot_product_attention, or transformers' own code for models that it cannot compute.

    It knows neither sinks, for which transformers refuses it, nor a cap of the scores, which it would ignore.
    """
    hf: Any = model
    capped = getattr(hf.config.get_text_config(), "attn_logit_softcapping", None) is not None
    try:
        hf.set_attn_implementation("eager" if capped else hf.get_correct_attn_implementation("sdpa"))
    except ValueError:
        hf.set_attn_implementation("eager")
