"""Facts about a Hugging Face model that need no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from core.errors import UserError
from modeling.pretrained import build_from_config, load_pretrained


def read_config(path: str) -> Any | None:
    """Return the model's transformers config; None where it cannot be read (the hub is not reachable, say)."""
    from transformers import AutoConfig

    try:
        return load_pretrained(AutoConfig, path)
    except (OSError, ValueError):
        return None


def meta_model(path: str) -> nn.Module | None:
    """Return the model on the meta device, without memory for weights; None where its config cannot be read."""
    from transformers import AutoModelForCausalLM

    config = read_config(path)
    if config is None:
        return None
    with torch.device("meta"):
        return build_from_config(AutoModelForCausalLM, config)


def check_model_folder(path: str, *, key: str = "model.path") -> None:
    """Raise UserError for a local folder that is not a model, before anything is started."""
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
    """Return the largest number of tokens of a sequence; None where the config does not say."""
    config = read_config(path)
    return None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)
