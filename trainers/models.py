"""Load a causal LM the way training needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from configs.schema import LoraConfig
from core.errors import UserError
from trainers.attention import attend_by_sequence_if_able

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model(
    path: str, *, dtype: str, attention: str, gradient_checkpointing: bool = False, lora: LoraConfig | None = None
) -> nn.Module:
    """A Hugging Face causal LM on the CPU, without dropout (two forward passes of one policy must agree).

    With `lora` it has a new adapter, and all else is frozen.
    """
    from transformers import AutoModelForCausalLM

    model = _load(AutoModelForCausalLM, path, dtype, attention, gradient_checkpointing)
    if lora is None:
        return model
    from trainers.lora import with_adapter

    return with_adapter(model, lora, path=path)


def load_scalar_model(path: str, *, dtype: str, attention: str, gradient_checkpointing: bool = False) -> nn.Module:
    """A value or reward model: the transformer with one number instead of logits, `score`, a sequence classifier's.

    The head of a reward model that was saved is kept; a new one begins at zero.
    """
    from transformers import AutoModelForSequenceClassification

    was_scalar = any(
        "SequenceClassification" in name for name in getattr(read_config(path), "architectures", None) or []
    )
    model = _load(AutoModelForSequenceClassification, path, dtype, attention, gradient_checkpointing, num_labels=1)
    if not was_scalar:
        nn.init.zeros_(model.score.weight)
    # A sequence classifier looks for its last token by this; values are read elsewhere, see forward.values_of.
    model.config.pad_token_id = model.config.pad_token_id or 0
    return model


def _load(auto: Any, path: str, dtype: str, attention: str, checkpointing: bool, **settings: Any) -> nn.Module:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it would tell of the head that a value model lacks
    if attention != "auto":
        settings["attn_implementation"] = attention
    try:
        model = auto.from_pretrained(path, dtype=DTYPES[dtype], **settings)
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


def read_config(path: str) -> Any | None:
    """The model's transformers config, or None where it cannot be read (a hub that is not reached, say)."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError):
        return None


def skeleton(path: str) -> nn.Module | None:
    """The model without memory for its weights, None where its config cannot be read."""
    from transformers import AutoModelForCausalLM

    config = read_config(path)
    if config is None:
        return None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def check_model_folder(path: str, *, key: str = "model.path") -> None:
    """Refuse a local folder that is not a model, in one sentence, before anything is started."""
    folder = Path(path)
    if not folder.exists():
        if path.startswith((".", "/", "~")) or path.count("/") > 1 or path.split("/")[0] in ("models", "runs", "data"):
            raise UserError(f"{key}={path} does not exist: make the folder first, or name a model of the hub")
        return
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{key}={path} is an adapter without its model: train it with model.lora.merge_on_save, which saves the "
            "whole model"
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"{key}={path} has no config.json: it is not a Hugging Face model folder")
    if read_config(path) is None:
        raise UserError(f"{folder / 'config.json'} cannot be read as a model config: repair it or save the model again")


def max_positions(path: str) -> int | None:
    """Tokens a sequence of this model may have, None where its config does not say."""
    config = read_config(path)
    return None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)
