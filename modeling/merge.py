"""Merge a saved adapter into its model, for engines that load a single folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import UserError, first_line, writing
from core.text.text_files import parse_json, read_text
from modeling.load import DTYPES, load_model
from modeling.pretrained import load_adapter

if TYPE_CHECKING:
    from peft import PeftModel

    from configs.eval_schema import EvalModelConfig

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


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
    base = load_model(model.path, dtype="float32", attention="sdpa", trust_remote_code=model.trust_remote_code)
    try:
        wrapped = load_adapter(base, adapter)
        _check_names(wrapped, Path(adapter))
        # safe_merge: raises for an adapter with numbers that are not finite
        merged = wrapped.merge_and_unload(safe_merge=True).to(DTYPES[model.dtype])
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"model.adapter={adapter} cannot be merged into model.path={model.path} ({first_line(error)}): name the "
            "model that it was trained on"
        ) from error
    with writing(folder):
        merged.save_pretrained(folder)


def _check_names(wrapped: PeftModel, adapter: Path) -> None:
    """Raise ValueError unless the file contains exactly the adapter's tensors; PEFT only warns."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    with safe_open(adapter / ADAPTER_WEIGHTS, framework="pt") as file:
        saved = {*file.keys()}
    wanted = {*get_peft_model_state_dict(wrapped)}
    if odd := sorted(saved ^ wanted):
        raise ValueError(f"{odd[0]} is {'in its file only' if odd[0] in saved else 'missing in its file'}")
