"""Load a causal LM for training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from configs.trainer_schema import LoraConfig
from core.errors import UserError
from modeling.attention import attend_by_sequence_if_able
from modeling.hf_config import read_config
from modeling.pretrained import load_pretrained

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model(
    path: str, *, dtype: str, attention: str, gradient_checkpointing: bool = False, lora: LoraConfig | None = None
) -> nn.Module:
    """Load a Hugging Face causal LM on the CPU, without dropout (two forward passes of one policy must agree).

    With `lora` it has a new adapter, and everything else is frozen. Raises UserError where it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    model = _load_pretrained(AutoModelForCausalLM, path, dtype, attention, gradient_checkpointing)
    if lora is None:
        return model
    from modeling.lora import with_adapter

    return with_adapter(model, lora, path=path)


def load_scalar_model(path: str, *, dtype: str, attention: str, gradient_checkpointing: bool = False) -> nn.Module:
    """Load a value or reward model: the transformer of `path` with the head of a sequence classifier with one label.

    The head of a saved reward model is kept; a new one starts at zero.
    """
    from transformers import AutoModelForSequenceClassification

    was_scalar = any(
        "SequenceClassification" in name for name in getattr(read_config(path), "architectures", None) or []
    )
    model = _load_pretrained(
        AutoModelForSequenceClassification, path, dtype, attention, gradient_checkpointing, num_labels=1
    )
    if not was_scalar:
        nn.init.zeros_(model.score.weight)
    # A sequence classifier needs it to find the last token; values are read elsewhere, see forward.compute_values.
    model.config.pad_token_id = model.config.pad_token_id or 0
    return model


def _load_pretrained(
    auto: Any, path: str, dtype: str, attention: str, checkpointing: bool, **settings: Any
) -> nn.Module:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # else it warns about the missing head of a value model
    if attention != "auto":
        settings["attn_implementation"] = attention
    try:
        model = load_pretrained(auto, path, dtype=DTYPES[dtype], **settings)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"model.path={path} cannot be loaded: {str(error).splitlines()[0]}") from error
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if any(getattr(model.config, key, 0.0) for key in ("attention_dropout", "attn_pdrop", "hidden_dropout")):
        raise UserError(f"model.path={path} has dropout in its config.json: set it to 0")
    if attention == "auto":
        attend_by_sequence_if_able(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()
