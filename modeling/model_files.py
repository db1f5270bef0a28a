"""Model folders on disk: headers of their safetensors files, and the ties that these show."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modeling.hf_config import meta_model, read_config

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Floating dtypes by their names in safetensors files."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configs of mixtures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """Entry of a safetensors header."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None for integers and booleans."""


def find_model_file(path: str, name: str) -> Path | None:
    """Return a file of a model folder, or of a Hub model in the cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(path).is_dir():
        return found if (found := Path(path) / name).is_file() else None
    try:
        cached = try_to_load_from_cache(path, name)
    except HFValidationError:  # neither a folder nor a name of the Hub
        return None
    return Path(cached) if isinstance(cached, str) else None


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the tensors in a folder's safetensors files, by name."""
    return {name: header for file in sorted(folder.glob("*.safetensors")) for name, header in _read_file(file)}


def _read_file(file: Path) -> Iterator[tuple[str, TensorHeader]]:
    with _opened(file) as tensors:
        for name in tensors.keys():  # noqa: SIM118 - safetensors gives no iterator
            part = tensors.get_slice(name)
            yield name, TensorHeader(file=file, shape=tuple(part.get_shape()), dtype=DTYPES.get(part.get_dtype()))


@contextmanager
def _opened(file: Path) -> Generator[Any]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        yield tensors


def list_ties(model: nn.Module) -> list[tuple[str, str]]:
    """Return pairs of parameter names that are one tensor by the model's config, such as head and embedding."""
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return sorted(ties.items())


def find_own_head(path: str, *, trust_remote_code: bool = False) -> str | None:
    """Return the head that a model's files hold though its config ties it to the embedding; None without one.

    transformers loads such a head untied, and an engine that follows the config ties it. A head of equal values is
    tied by both. The head is named as in the files.
    """
    config = find_model_file(path, "config.json")
    if config is None or not read_config(path, trust_remote_code=trust_remote_code).tie_word_embeddings:
        return None
    headers = read_headers(config.parent)
    for name, source in list_ties(meta_model(path, trust_remote_code=trust_remote_code)):
        if name in headers and source in headers and not _same_values(headers[name], headers[source], name, source):
            return name
    return None


def explain_gap(path: str, *, trust_remote_code: bool = False) -> str:
    """Return parts of a model that may make an engine disagree with the trainer, as clauses; "" if none is known."""
    causes: list[str] = []
    config = read_config(path, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    if head := find_own_head(path, trust_remote_code=trust_remote_code):
        causes.append(
            f"the head is tied in the config and not in the file, which holds {head} with values of its own: set "
            f"tie_word_embeddings to false in config.json of {path}"
        )
    elif config.tie_word_embeddings:
        causes.append("the head is tied to the embedding and sent once, so the engine must use one tensor for both")
    if any((getattr(text, name, None) or 0) > 1 for name in EXPERTS):
        causes.append(
            "the model is a mixture of experts, and where two experts are nearly equal, engine and trainer may choose "
            "different ones: compare with model.dtype=float32, and raise weight_sync.probe_tolerance if that agrees"
        )
    return "; ".join(causes)


def _same_values(one: TensorHeader, other: TensorHeader, name: str, source: str) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    with _opened(one.file) as first, _opened(other.file) as second:
        return torch.equal(first.get_tensor(name), second.get_tensor(source))


def missing_in_index(folder: Path) -> str | None:
    """Return a tensor that the index lists and no file has, or the reverse; None if they agree."""
    if not (folder / INDEX).is_file():
        return None
    listed: dict[str, str] = json.loads((folder / INDEX).read_bytes())["weight_map"]
    there = {name: header.file.name for name, header in read_headers(folder).items()}
    return min((name for name in listed | there if listed.get(name) != there.get(name)), default=None)
