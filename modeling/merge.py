"""Merge a saved adapter into its model, for engines that load a single folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import UserError, first_line, writing
from core.text.text_files import parse_json, read_text
from modeling.load import DTYPES, load_model
from modeling.pretrained import load_adapter
from modeling.saved_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_adapter_tensors, check_saved, save_whole

if TYPE_CHECKING:
    from configs.eval_schema import EvalModelConfig


def check_adapter(folder: str, *, key: str) -> None:
    """Raise UserError unless the folder contains an adapter in PEFT's format and safetensors."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not os.path.isfile(Path(folder) / name):
            raise UserError(f"{key}={folder} has no {name}: name the folder of an adapter in PEFT's format")
    config = Path(folder) / ADAPTER_CONFIG
    if not isinstance(parse_json(read_text(config, str(config)), str(config)), dict):
        raise UserError(f"{key}: {config} must hold an object: save the adapter again")


def merge_adapter(model: EvalModelConfig, adapter: str, folder: Path) -> None:
    """Write the model with merged adapter, computed in float32 and rounded once.

    Raises UserError for an adapter that does not fit the model.
    """
    base = load_model(model.path, dtype="float32", attention="auto", trust_remote_code=model.trust_remote_code)
    try:
        wrapped = load_adapter(base, adapter)
        check_adapter_tensors(wrapped, Path(adapter))
        # safe_merge: raises for an adapter with numbers that are not finite
        merged = wrapped.merge_and_unload(safe_merge=True).to(DTYPES[model.dtype])
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"model.adapter={adapter} cannot be merged into model.path={model.path} ({first_line(error)}): name the "
            "model that it was trained on"
        ) from error
    with writing(folder):
        save_whole(merged, folder)
    check_saved(folder, dtype=model.dtype, trust_remote_code=model.trust_remote_code)
