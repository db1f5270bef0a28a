"""Saved models: folders in Hugging Face format, written from exported tensors and read back."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from core.errors import RunStopped, UserError
from core.types.weights import ExportScope
from modeling.hf_config import meta_model
from modeling.load import DTYPES, load_empty
from modeling.lora import ADAPTER
from modeling.model_files import TensorHeader, find_own_head, missing_in_index, read_headers
from modeling.pretrained import read_adapter

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"


class SavedModelWrong(RunStopped):
    """Difference between the tensors of a saved model and those of its architecture."""


def save_exported(model: nn.Module, folder: Path, parts: dict[ExportScope, dict[str, Tensor]]) -> list[str]:
    """Save a model in Hugging Face format for `model.path`, with any adapter in the subfolder `adapter/`.

    Without whole weights, the adapter is saved in the folder itself, in PEFT's format. Returns sentences about what was
    corrected.
    """
    from safetensors.torch import save_file

    hf: Any = model
    corrected: list[str] = []
    if "whole" in parts:
        base = hf.get_base_model() if hasattr(hf, "peft_config") else hf
        # the given state: the model's own tensors may be sharded, wider, or without the merged adapter
        corrected = save_whole(base, folder, parts["whole"])
        _write_dtype(folder, parts["whole"])
    if "adapter" in parts:
        home = folder / "adapter" if "whole" in parts else folder
        home.mkdir(parents=True, exist_ok=True)
        save_file(parts["adapter"], home / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        hf.peft_config[ADAPTER].save_pretrained(home)
    _share(folder)
    return corrected


def save_whole(model: Any, folder: Path, tensors: dict[str, Tensor] | None = None) -> list[str]:
    """Save config, generation config and weights; return sentences about corrections.

    tensors: weights to save; None are the model's own.
    """
    corrected = correct_generation_config(model.generation_config) if model.can_generate() else None
    model.save_pretrained(folder, state_dict=tensors)
    return [] if corrected is None else [corrected]


def correct_generation_config(config: Any) -> str | None:
    """Correct a generation config that transformers refuses to save; return a sentence about it, or None.

    transformers reads such a file, and raises only when the trained model is saved.
    """
    if not (wrong := _list_invalid(config)):
        return None
    given, sampled = {name: getattr(config, name) for name in wrong}, config.do_sample
    # a temperature without do_sample, as of Llama 2, was meant to be sampled at; a temperature of 0 was not
    config.do_sample = sampled if given.get("temperature") == 0 else True
    still = _list_invalid(config)
    done = [] if len(still) == len(wrong) else ["with do_sample=true"]
    if not done:
        config.do_sample = sampled
    for name in still:
        config.update(**{name: None})
        done.append(f"without {name}")
    named = ", ".join(f"{name}={value}" for name, value in given.items())
    return f"{GENERATION_CONFIG} of the base model is invalid ({named}): it is saved {' and '.join(done)}"


def _list_invalid(config: Any) -> list[str]:
    """Return the attributes for which transformers refuses to save a generation config."""
    try:
        config.validate(strict=True)
    except ValueError as error:
        return re.findall(r"^- `(\w+)`:", str(error), flags=re.MULTILINE)
    return []


def write_stop_tokens(folder: Path, *, eos: int, stops: Sequence[int]) -> None:
    """Correct the end-of-sequence tokens in a saved model's configs, so that `generate()` stops where the run did.

    eos: the tokenizer's. stops: all tokens that end a reply. A folder without a config, of an adapter, has none.
    """
    for name, needed in ((CONFIG, [eos]), (GENERATION_CONFIG, [*stops])):
        path = folder / name
        if not path.is_file():
            continue
        config = json.loads(path.read_bytes())
        # a vision-language model may have it in the part of its text
        inner = config["text_config"] if "eos_token_id" not in config and "text_config" in config else config
        found = inner.get("eos_token_id")
        known = found if isinstance(found, list) else [found]
        if not {*needed} <= {*known}:
            inner["eos_token_id"] = needed[0] if len(needed) == 1 else needed
            _write_json(path, config)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_dtype(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Correct the dtype in config.json: transformers writes the training model's, which may be wider."""
    path = folder / CONFIG
    config = json.loads(path.read_bytes())
    dtype = str(next(t.dtype for t in tensors.values() if t.is_floating_point())).removeprefix("torch.")
    if config.get("dtype") != dtype:
        _write_json(path, config | {"dtype": dtype})


def _share(folder: Path) -> None:
    """Set default file permissions; safetensors restricts its files to the owner."""
    # The only way to read the umask is to set it.
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)


def check_saved(folder: Path, *, dtype: str, trust_remote_code: bool = False) -> int:
    """Read back the headers of a saved model and adapter; return the number of tensors.

    Raises SavedModelWrong for a tensor whose name, shape, dtype or tie differs from those of the model that the saved
    config describes. dtype: the recipe's.
    """
    checked = 0
    if (folder / CONFIG).is_file():
        checked += _check_whole(folder, DTYPES[dtype], trust_remote_code=trust_remote_code)
    for home in (folder, folder / "adapter"):
        if (home / ADAPTER_CONFIG).is_file():
            checked += _check_adapter(home, DTYPES[dtype], trust_remote_code=trust_remote_code)
    if not checked:
        raise SavedModelWrong(
            f"{folder} has no tensors where this process reads it: run_dir and save_to must be folders that every "
            "machine of the run shares"
        )
    return checked


def _check_whole(folder: Path, dtype: torch.dtype, *, trust_remote_code: bool) -> int:
    from transformers.utils.import_utils import is_accelerate_available

    headers = read_headers(folder)
    if name := missing_in_index(folder):
        raise _wrong(folder, f"{name} is not in the file that the index names")
    try:
        # transformers' own reading, which renames and joins tensors, as of experts, for some architectures
        # without accelerate, a dependency of peft, names and shapes are compared by the next load only
        read = partial(load_empty, dtype=dtype) if is_accelerate_available() else meta_model
        model = read(str(folder), key="saved", trust_remote_code=trust_remote_code)
    except UserError as error:
        raise _wrong(folder, str(error)) from error
    wanted: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, header in headers.items():
        # a few parameters of some architectures stay in float32
        allowed = {dtype, wanted[name].dtype} if name in wanted else {dtype, *(p.dtype for p in wanted.values())}
        if header.dtype not in {None, *allowed}:
            raise _wrong(folder, f"{name} has dtype {_name(header.dtype)}, and {_name(dtype)} is expected")
    if head := find_own_head(str(folder), trust_remote_code=trust_remote_code):
        raise _wrong(folder, f"{head} has values of its own, and config.json ties it to the embedding")
    return len(headers)


def _check_adapter(home: Path, dtype: torch.dtype, *, trust_remote_code: bool) -> int:
    import peft

    config = read_adapter(str(home))
    empty: Any = meta_model(config.base_model_name_or_path, trust_remote_code=trust_remote_code)
    wrapped: Any = peft.get_peft_model(empty, config)
    try:
        headers = check_adapter_tensors(wrapped, home)
    except ValueError as error:
        raise _wrong(home, str(error)) from error
    for name, header in headers.items():
        if header.dtype != dtype:
            raise _wrong(home, f"{name} has dtype {_name(header.dtype)}, and {_name(dtype)} is expected")
    return len(headers)


def check_adapter_tensors(wrapped: PeftModel, folder: Path) -> dict[str, TensorHeader]:
    """Return the headers of an adapter's file. Raises ValueError unless it has exactly the adapter's tensors.

    PEFT itself only warns.
    """
    from peft import get_peft_model_state_dict

    headers = read_headers(folder)
    wanted: dict[str, Tensor] = get_peft_model_state_dict(wrapped)
    if odd := sorted(headers.keys() ^ wanted.keys()):
        raise ValueError(f"{odd[0]} is {'in its file only' if odd[0] in headers else 'missing in its file'}")
    for name, header in headers.items():
        if header.shape != tuple(wanted[name].shape):
            raise ValueError(f"{name} has shape {[*header.shape]} in its file, and {[*wanted[name].shape]} is expected")
    return headers


def _wrong(folder: Path, found: str) -> SavedModelWrong:
    return SavedModelWrong(f"the model was saved wrongly: {found}; what was written is left in {folder}")


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
