"""Convert a checkpoint to a model in Hugging Face format."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from configs.trainer_schema import LoraConfig
from core.errors import UserError, writing
from core.types.weights import ExportScope
from driver.checkpoint import PROGRESS, read_checkpoint
from modeling.export import exported_tensors
from modeling.freeze import find_frozen, freeze
from modeling.hf_config import ImageUse
from modeling.load import load_model
from modeling.saved_model import check_saved, save_exported
from trainers.checkpoint.saved_policy import load_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointModel:
    """Facts for loading a checkpoint's model."""

    folder: Path
    base: str
    """`model.path` of the run, with config, tokenizer and frozen weights."""
    dtype: str
    lora: LoraConfig | None
    quantization: Literal["nf4"] | None
    freeze: Sequence[str]
    """`trainer.freeze` of the run, whose parameters the checkpoint omits."""
    images: ImageUse
    """`model.images` of the run."""


def find_checkpoint_model(path: str) -> CheckpointModel | None:
    """Describe a checkpoint's model; None if `path` is no checkpoint. Raises UserError for a damaged checkpoint."""
    # Unlike Path.is_file, os.path.isfile is False for a name that is too long.
    if not os.path.isfile(Path(path) / PROGRESS):
        return None
    checkpoint = read_checkpoint(Path(path))
    if checkpoint is None:
        raise UserError(f"{path} is a checkpoint that was not finished: name another one, or a model folder of the run")
    settings = checkpoint.state.recipe["settings"]
    if settings.get("alg.name") == "reward_model":
        raise UserError(f"{path} is of a reward model, which scores text and writes none: name a run with a policy")
    lora = _read_section(settings, "model.lora.")
    return CheckpointModel(
        folder=checkpoint.folder,
        base=settings["model.path"],
        dtype=settings["model.dtype"],
        lora=LoraConfig(**lora) if lora else None,
        quantization=settings.get("model.quantization"),
        freeze=settings.get("trainer.freeze", ()),
        images=settings.get("model.images", "auto"),
    )


def write_checkpoint_model(found: CheckpointModel, folder: Path, *, trust_remote_code: bool) -> None:
    """Write the checkpoint's model with any adapter merged in, as the run would have saved it."""
    model: Any = load_model(
        found.base,
        dtype=found.dtype,
        # No forward pass is made, so the kernel does not matter.
        attention="auto",
        lora=found.lora,
        quantization=found.quantization,
        key=f"{found.folder}, model.path",
        trust_remote_code=trust_remote_code,
    )
    if found.lora is None:  # else PEFT has frozen all that the checkpoint omits
        freeze(model, find_frozen(model, found.freeze, images=found.images))
    load_policy(model, found.folder)
    exported = exported_tensors(model)
    scopes: list[ExportScope] = ["whole", "adapter"] if found.lora and not found.quantization else ["whole"]
    with writing(folder):
        save_exported(model, folder, {scope: {t.name: t.compute() for t in exported[scope]} for scope in scopes})
    check_saved(folder, dtype=found.dtype, trust_remote_code=trust_remote_code)


def _read_section(settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}
