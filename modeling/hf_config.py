"""Facts about a Hugging Face model that need no weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from core.errors import UserError, name_error, quote
from core.gc_control import without_gc
from core.hub import describe_hub, prepare_hub
from core.loading import needs_part
from modeling.pretrained import build_from_config, load_pretrained, refuse_own_code

if TYPE_CHECKING:
    from modeling.images.vision import VisionFamily

ImageUse = Literal["auto", "off"]
"""Values of model.images."""
LOCAL = ("models", "runs", "data")
"""First path parts that denote folders of this clone instead of owners on the Hub."""


class ModelUnreadable(UserError):
    """Error of a missing model or an unreadable config."""


def read_config(path: str, *, key: str = "model.path", trust_remote_code: bool = False) -> Any:
    """Read a model's transformers config. Raises UserError with the reason."""
    from transformers import AutoConfig

    is_folder = os.path.isdir(path)
    if not is_folder:
        prepare_hub(f"{key}={quote(path)}")
    try:
        with without_gc():  # transformers imports what it needs for this model only here
            return load_pretrained(AutoConfig, path, trust_remote_code=trust_remote_code)
    except Exception as error:  # a border: a broken file can make the library raise anything
        reason = name_error(error)
        if refusal := refuse_own_code(error, key=key, path=path, trust_remote_code=trust_remote_code):
            raise ModelUnreadable(refusal) from error
        if is_folder:
            file = Path(path) / "config.json"
            raise ModelUnreadable(
                f"{key}: {file} cannot be read as a model config ({reason}): repair it or save the model again"
            ) from error
        raise ModelUnreadable(
            f"{key}={quote(path)} is no folder here, and no model that the hub or its cache gives ({reason}); "
            f"{describe_hub()}"
        ) from error


def vision_family(config: Any, *, who: str = "") -> VisionFamily | None:
    """Return a vision-language model's parts; None for a text model or an unknown family.

    who: key and path of the model, for the error if modeling/images is missing in this clone; "": model.path.
    """
    if getattr(config, "vision_config", None) is None:
        return None
    with needs_part(who or f"model.path={quote(config.name_or_path)}", otherwise="take a text model"):
        from modeling.images.vision import VISION_FAMILIES

    return VISION_FAMILIES.get(config.model_type)


def needs_images(
    path: str, *, key: str = "model.path", trust_remote_code: bool = False, images: ImageUse = "auto"
) -> bool:
    """Tell whether a model reads images here. A vision-language model of an unknown family is used for text."""
    if images == "off":
        return False
    config = read_config(path, key=key, trust_remote_code=trust_remote_code)
    return vision_family(config, who=f"{key}={quote(path)}") is not None


def is_text_use(config: Any, images: ImageUse = "auto") -> bool:
    """Tell whether a model with other parts than text is used for text only: as asked, or as the family is unknown."""
    parts = (getattr(config, name, None) for name in ("vision_config", "audio_config"))
    return any(part is not None for part in parts) and (images == "off" or vision_family(config) is None)


def choose_class(config: Any, *, path: str, key: str = "model.path") -> Any:
    """Return the transformers class that loads a model with a language-model head. Raises UserError if none does."""
    import transformers as hf

    if vision_family(config, who=f"{key}={quote(path)}") is not None:
        return hf.AutoModelForImageTextToText
    if not is_text_use(config) or hf.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is not None:
        return hf.AutoModelForCausalLM
    if hf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None) is not None:
        return hf.AutoModelForImageTextToText
    raise UserError(
        f"{key}={quote(path)} is a {config.model_type} model, and transformers has no class that loads its language "
        "part: take another model"
    )


def meta_model(path: str, *, key: str = "model.path", trust_remote_code: bool = False) -> nn.Module:
    """Create the model on the meta device, without memory for weights. Raises UserError with the reason."""
    config = read_config(path, key=key, trust_remote_code=trust_remote_code)
    auto = choose_class(config, path=path, key=key)
    try:
        with torch.device("meta"):
            return build_from_config(auto, config, trust_remote_code=trust_remote_code)
    except Exception as error:  # a border, as above: the numbers of the config may not fit together
        raise ModelUnreadable(
            f"{key}={quote(path)}: its config.json makes no causal language model ({name_error(error)}): take "
            "another model, or repair it"
        ) from error


def check_model_folder(path: str, *, key: str = "model.path", trust_remote_code: bool = False) -> None:
    """Raise UserError if a local folder or Hub name is not a model, before anything starts."""
    folder = Path(path)
    if not os.path.isdir(path):
        if os.path.exists(path):
            raise ModelUnreadable(f"{key}={path} is a file: name the folder that holds the model's config.json")
        # Such a path means a folder; requesting it from the Hub would end in a misleading error.
        if not path or path.startswith((".", "/", "~")) or path.count("/") > 1 or path.split("/")[0] in LOCAL:
            raise ModelUnreadable(
                f"{key}={quote(path)} does not exist: make the folder first, or name a model of the hub"
            )
    elif (folder / "adapter_config.json").is_file():
        raise ModelUnreadable(
            f"{key}={path} is an adapter without its model: train it with model.lora.merge_on_save, which saves the "
            "whole model"
        )
    elif not (folder / "config.json").is_file():
        raise ModelUnreadable(f"{key}={path} has no config.json: {_name_other_folder(folder)}")
    read_config(path, key=key, trust_remote_code=trust_remote_code)


def _name_other_folder(folder: Path) -> str:
    """Describe a folder without a model, and name the folder to use."""
    if (folder / "progress.json").is_file():
        return "it is a checkpoint: `resume` continues its run, and main_eval.py evaluates it; else name a model folder"
    if (folder / "model" / "config.json").is_file():
        return f"it is a run folder: name {folder / 'model'}"
    return "it is not a Hugging Face model folder"


def max_positions(path: str, *, trust_remote_code: bool = False) -> int | None:
    """Return the maximum sequence length in tokens; None if the config has none."""
    config = read_config(path, trust_remote_code=trust_remote_code).get_text_config()
    return getattr(config, "max_position_embeddings", None)
