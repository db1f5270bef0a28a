"""Parameters and memory of a model's vision part, for --explain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from configs.schema import RunConfig
from driver.checks.memory_estimate import GIB, BytesEach
from modeling.freeze import find_frozen
from modeling.hf_config import meta_model
from modeling.images.vision import VISION_FAMILIES

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionPart:
    """Sizes of a model's vision part."""

    parameters: int
    """Parameters of tower and connector."""
    frozen: int
    """Parameters of these that trainer.freeze freezes."""
    trains_tower: bool
    layers: int
    """Layers of the tower."""
    width: int
    """Hidden size of the tower."""
    patches: int
    """Patches per token."""
    numbers: int
    """Input values per patch."""


def measure_vision(cfg: RunConfig) -> VisionPart:
    """Return the sizes of the model's vision part without allocating it."""
    model = meta_model(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code)
    config: Any = model.config
    parts = VISION_FAMILIES[config.model_type]
    vision = config.vision_config
    frames = getattr(vision, "temporal_patch_size", 1)
    sizes = {name: p.numel() for name, p in model.named_parameters() if parts.in_vision(name)}
    frozen = find_frozen(model, cfg.trainer.freeze, images=cfg.model.images)
    return VisionPart(
        parameters=sum(sizes.values()),
        frozen=sum(n for name, n in sizes.items() if name in frozen),
        trains_tower=any(parts.in_tower(name) and name not in frozen for name in sizes),
        layers=vision.depth if hasattr(vision, "depth") else vision.num_hidden_layers,
        width=getattr(vision, "embed_dim", vision.hidden_size),  # of Qwen2-VL hidden_size is the language part's
        patches=_find_side(config) ** 2,
        # Red, green and blue of every pixel, over the frames that a patch spans.
        numbers=3 * frames * vision.patch_size**2,
    )


def _find_side(config: Any) -> int:
    """Return the side of the square of patches that becomes a token."""
    vision = config.vision_config
    if hasattr(config, "mm_tokens_per_image"):  # Gemma 3, whose images are squares of one size
        return vision.image_size // vision.patch_size // math.isqrt(config.mm_tokens_per_image)
    if hasattr(config, "scale_factor"):  # Idefics3
        return config.scale_factor
    return vision.spatial_merge_size if hasattr(vision, "spatial_merge_size") else vision.pooling_kernel_size


def describe_vision(
    cfg: RunConfig, *, parameters: int, models: int, per_rank: float, each: BytesEach
) -> list[tuple[str, str]]:
    """Describe the model's vision part and the memory of images.

    models: number of trained models, value model included. per_rank: GiB of a trainer rank before the first batch.
    """
    part, lora = measure_vision(cfg), cfg.model.lora
    if lora is not None:
        how = "with adapters" if lora.vision else "frozen"
    else:
        how = f"{part.frozen:,} of them frozen" if part.frozen else "trained"
    tokens = cfg.trainer.micro_batch_tokens
    held = 2 if cfg.model.dtype == "bfloat16" else 4
    # The worst case: every token of the micro-batch belongs to an image.
    patches = tokens * part.patches
    pixels = patches * part.numbers * held / MIB
    learns = part.trains_tower if lora is None else lora.vision
    kept = patches * part.width * part.layers * held / MIB if learns else 0.0
    trained = (models if lora is None else models - 1) * (part.parameters - part.frozen)
    idle = (models * part.parameters - trained) * each.idle
    vision = (idle + trained * (each.weights + each.gradients + each.optimizer)) / GIB
    return [
        ("of these, vision", f"{part.parameters:,} ({part.parameters / parameters:.0%}), {how}"),
        (
            "images",
            f"a token of an image is {part.patches} patches; if all {tokens:,} tokens of a micro-batch are of "
            f"images, {patches:,} patches go through the tower's {part.layers} layers, and their "
            f"pixels take {pixels:,.0f} MiB" + (f", the inputs of these layers {kept:,.0f} MiB" if kept else ""),
        ),
        (
            "memory for images",
            f"about {vision:.2f} GiB per rank ({vision / per_rank:.0%}) for weights, gradients and optimizer of the "
            f"vision part; {'pixels and inputs of layers' if kept else 'pixels'} come on top, up to "
            f"{(pixels + kept) * MIB / GIB:.2f} GiB",
        ),
    ]
