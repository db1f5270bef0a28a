"""Load a causal LM the way training needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from core.errors import UserError
from trainers.attention import attend_by_sequence_if_able

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model(
    path: str, *, dtype: str, attention: str, by_sequence: bool = False, gradient_checkpointing: bool = False
) -> nn.Module:
    """A Hugging Face causal LM on the CPU, without dropout (two forward passes of one policy must agree).

    `by_sequence`: with trainers/attention.py where it is able, which cannot generate.
    """
    from transformers import AutoModelForCausalLM

    return _load(AutoModelForCausalLM, path, dtype, attention, by_sequence, gradient_checkpointing)


def load_value_model(
    path: str, *, dtype: str, attention: str, by_sequence: bool = False, gradient_checkpointing: bool = False
) -> nn.Module:
    """The transformer of a causal LM with one number per token instead of logits; the new head begins at zero."""
    from transformers import AutoModelForTokenClassification

    model = _load(
        AutoModelForTokenClassification, path, dtype, attention, by_sequence, gradient_checkpointing, num_labels=1
    )
    for p in model.score.parameters():
        nn.init.zeros_(p)
    return model


def _load(
    auto: Any, path: str, dtype: str, attention: str, by_sequence: bool, checkpointing: bool, **settings: Any
) -> nn.Module:
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
    if by_sequence:
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


def check_model_folder(path: str, *, key: str = "model.path") -> None:
    """Refuse a local folder that is not a model, in one sentence, before anything is started."""
    folder = Path(path)
    if not folder.exists():
        if path.startswith((".", "/", "~")) or path.count("/") > 1 or path.split("/")[0] in ("models", "runs", "data"):
            raise UserError(f"{key}={path} does not exist: make the folder first, or name a model of the hub")
        return
    if not (folder / "config.json").is_file():
        raise UserError(f"{key}={path} has no config.json: it is not a Hugging Face model folder")
    if read_config(path) is None:
        raise UserError(f"{folder / 'config.json'} cannot be read as a model config: repair it or save the model again")


def max_positions(path: str) -> int | None:
    """Tokens a sequence of this model may have, None where its config does not say."""
    config = read_config(path)
    return None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)
