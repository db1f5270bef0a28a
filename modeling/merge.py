"""Merge a saved adapter into its model, for engines that sample without adapters."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import UserError, first_line, quote, writing
from core.text.text_files import parse_json, read_text
from modeling.hf_config import meta_model
from modeling.load import DTYPES, load_model
from modeling.pretrained import load_adapter, read_adapter
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


def is_adapter(folder: str) -> bool:
    """Return whether a folder contains an adapter without its model."""
    return os.path.isfile(Path(folder) / ADAPTER_CONFIG)  # unlike is_file, False for a name that is too long


def check_base(folder: str, path: str, *, key: str, trust_remote_code: bool = False) -> None:
    """Raise UserError for an adapter of another model than model.path, or whose config and tensors differ."""
    import peft

    check_adapter(folder, key=key)
    config = Path(folder) / ADAPTER_CONFIG
    base = parse_json(read_text(config, str(config)), str(config)).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(
            f"{key}={folder}: {ADAPTER_CONFIG} names no base_model_name_or_path, the model that it was trained on: add "
            "it"
        )
    if not _is_same_model(base, path):
        raise UserError(
            f"{key}={folder} is an adapter of {quote(base)}, and model.path is {path}: name an adapter of model.path; "
            f"if both are the same model, correct base_model_name_or_path in {config}"
        )
    empty: Any = meta_model(path, trust_remote_code=trust_remote_code)
    with _naming_adapter(folder, path, key=key):
        wrapped: Any = peft.get_peft_model(empty, read_adapter(folder))
        check_adapter_tensors(wrapped, Path(folder))


def _is_same_model(one: str, other: str) -> bool:
    """Return whether two paths are the same folder, or two names of the hub are equal."""
    if os.path.isdir(one) and os.path.isdir(other):
        return os.path.samefile(one, other)
    return one == other


def load_merged(path: str, adapter: str, *, dtype: str, key: str, trust_remote_code: bool = False) -> Any:
    """Load a model with merged adapter, computed in float32 and rounded once.

    Raises UserError for an adapter that does not fit the model. key: that of the adapter.
    """
    base = load_model(path, dtype="float32", attention="auto", trust_remote_code=trust_remote_code)
    with _naming_adapter(adapter, path, key=key):
        wrapped = load_adapter(base, adapter)
        check_adapter_tensors(wrapped, Path(adapter))
        # safe_merge: raises for an adapter with numbers that are not finite
        return wrapped.merge_and_unload(safe_merge=True).to(DTYPES[dtype])


@contextmanager
def _naming_adapter(adapter: str, path: str, *, key: str) -> Generator[None]:
    """Turn errors of PEFT into a UserError that names adapter and model."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{key}={adapter} cannot be merged into model.path={path} ({first_line(error)}): name the "
            "model that it was trained on"
        ) from error


def merge_adapter(model: EvalModelConfig, adapter: str, folder: Path) -> None:
    """Write the model with merged adapter. Raises UserError for an adapter that does not fit the model."""
    trusts = model.trust_remote_code
    merged = load_merged(model.path, adapter, dtype=model.dtype, key="model.adapter", trust_remote_code=trusts)
    with writing(folder):
        save_whole(merged, folder)
    check_saved(folder, dtype=model.dtype, trust_remote_code=trusts)
