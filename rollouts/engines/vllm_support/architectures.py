"""Models that vLLM supports. It is queried in a separate process: importing vLLM is slow and needs settings."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from typing import Any

from torch import nn

from core.errors import RunStopped, UserError
from core.timing.deadlines import VLLM_IMPORT_TIMEOUT_S
from modeling.image_blocks import find_image_blocks

PACKAGES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ("torchvision",)),
    # also for text: vLLM imports their image processors
    **dict.fromkeys(("gemma3", "gemma4", "qwen3_5", "qwen3_5_moe"), ("torchvision",)),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), ("torchvision",)),
    "smolvlm": ("torchvision", "num2words"),
}
"""Packages that vLLM requires for families, by `model_type`."""
CODE = """
import sys
from vllm.model_executor.models.registry import ModelRegistry
print("vLLM has it:", sys.argv[1] in ModelRegistry.get_supported_archs())
"""


def check_user_code(model: nn.Module, *, path: str) -> None:
    """Raise UserError for an architecture that vLLM lacks, since its weights could not be synced."""
    [architecture, *_] = getattr(model.config, "architectures", None) or [type(model).__name__]
    if not has_architecture(architecture):
        raise UserError(
            f"model.path={path} comes with code of its own, and vLLM does not have its architecture "
            f"{architecture}: set rollout.engine=hf"
        )


def check_family(family: str, *, path: str, dtype: str) -> None:
    """Raise UserError if vLLM lacks a package for this family of models, or a build that loads here, or the dtype."""
    if family == "apertus" and dtype != "bfloat16":
        raise UserError(
            f"model.path={path} is an apertus model, and vLLM rounds weights of its activations to bfloat16 whatever "
            f"the dtype, so they would not be the trainer's: set model.dtype=bfloat16 instead of {dtype}, or "
            "rollout.engine=hf"
        )
    if lacking := [name for name in PACKAGES.get(family, ()) if not can_import(name)]:
        build = " (on a CPU the build of PyTorch's index whl/cpu, as PyPI's is for CUDA)"
        raise UserError(
            f"model.path={path} is a {family} model, which vLLM loads only with {' and '.join(lacking)}: install "
            f"what is missing{build if 'torchvision' in lacking else ''}, or set rollout.engine=hf"
        )


def check_images(config: Any, *, path: str) -> None:
    """Raise UserError for a model whose images vLLM computes otherwise than transformers, or counts otherwise."""
    if config.model_type == "gemma3":
        reason = "vLLM writes line breaks around an image itself, so its prompt is not the one that is trained on"
    elif find_image_blocks(config) is not None:
        reason = "the tokens of an image attend in both directions, and vLLM's attention on a CPU is causal"
    elif config.model_type == "gemma4":
        # vLLM counts tokens by the config, transformers by the processor, and a difference ends the engine
        counted = getattr(config.vision_config, "default_output_length", None)
        if counted == (cut := _find_soft_tokens(path)):
            return
        reason = (
            f"an image is up to {cut} tokens by max_soft_tokens of its processor, and {counted} by "
            "vision_config.default_output_length of its config.json, which vLLM reads: make them equal"
        )
    else:
        return
    raise UserError(
        f"model.path={path} is a {config.model_type} model with images: {reason}: set rollout.engine=hf, or "
        "model.images=off for text"
    )


def _find_soft_tokens(path: str) -> int:
    """Return the most tokens of an image by a Gemma 4's processor. Raises UserError if it cannot be loaded."""
    from modeling.images.processor import ImageProcessor

    return ImageProcessor(path).images.max_soft_tokens


def can_import(name: str) -> bool:
    """Tell whether a package is installed and loads: torchvision must be built for this torch."""
    try:
        import_module(name)
    except (ImportError, OSError, RuntimeError):  # RuntimeError: torchvision misses an operator of CUDA's torch
        return False
    return True


def has_architecture(name: str) -> bool:
    """Return whether vLLM supports an architecture. Raises RunStopped if vLLM cannot be imported."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", CODE, name], capture_output=True, text=True, timeout=VLLM_IMPORT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as late:
        raise RunStopped(f"vLLM could not be imported within {VLLM_IMPORT_TIMEOUT_S:g} s") from late
    # importing vLLM may print other text
    answer = asked.stdout.rpartition("vLLM has it: ")[2].strip()
    if asked.returncode != 0 or answer not in ("True", "False"):
        raise RunStopped(f"vLLM cannot be imported: {(asked.stderr.strip().splitlines() or ['it says nothing'])[-1]}")
    return answer == "True"
