"""Hashes of a run's model folders, so that a resume notices a model that was trained or saved again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from algs.base import Algorithm
from algs.teachers import list_paths
from configs.schema import RLConfig, RunConfig

MODEL_FILES = "the files of "
"""Prefix of the hashes' names."""
_CONFIGS = (
    *("config.json", "generation_config.json", "adapter_config.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
_PLACES, _BYTES = 64, 4096
"""Places of a file that are read, and the bytes at each: all of a large model would take minutes."""


def hash_models(cfg: RunConfig, alg: Algorithm) -> dict[str, str]:
    """Return hashes of the models in local folders, by name. Those of the hub are compared by their names."""
    paths: dict[str, str | None] = {"model.path": cfg.model.path}
    paths |= {f"{path}, which alg names": path for path in list_paths(alg.teachers)}
    if isinstance(cfg, RLConfig):
        paths["rollout.opponent"] = cfg.rollout.opponent_folder
        # a judge that was trained again gives other rewards
        paths["judge.model"] = None if cfg.judge is None or cfg.judge.is_policy else cfg.judge.model
    return hash_folders(paths)


def hash_folders(paths: Mapping[str, str | None]) -> dict[str, str]:
    """Return hashes of the models that are local folders, by name."""
    # unlike Path.is_dir, os.path.isdir is False for a name that is too long
    there = {key: path for key, path in paths.items() if path is not None and os.path.isdir(path)}
    return {MODEL_FILES + key: hash_model(Path(path)) for key, path in there.items()}


def hash_model(folder: Path) -> str:
    """Hash configurations, code and samples of the weights in a model's folder.

    Tokenizer and template are compared by what they write.
    """
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name in _CONFIGS or path.suffix == ".py":
            found.update(path.read_bytes())
        elif path.suffix in (".safetensors", ".bin") and path.is_file():
            found.update(f"{path.name} {path.stat().st_size}\n".encode())
            found.update(_sample_bytes(path))
    return found.hexdigest()


def _sample_bytes(path: Path) -> bytes:
    """Read a file at evenly spaced places. The first has the names and shapes of a small model."""
    last = max(0, path.stat().st_size - _BYTES)
    with path.open("rb") as file:
        return b"".join(_read_at(file, last * place // (_PLACES - 1)) for place in range(_PLACES))


def _read_at(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return file.read(_BYTES)
