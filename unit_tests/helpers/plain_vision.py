"""A small model that sees, images for it, and what plain transformers says of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText, PreTrainedModel

from core.types.images import EncodedImage, PlacedImage, read_image
from core.types.samples import Prompt, Sample, make_sample
from data_prep import tiny_vision_model
from modeling.images.processor import ImageProcessor
from rollouts.engines.base import Completion
from unit_tests.helpers.image_models import to_bytes
from unit_tests.helpers.seeing import END, START, TYPES


def make_seeing(folder: Path, *, max_length: int = 256) -> str:
    """Save a random Idefics3 that a look at another image moves by far; return its path."""
    tiny_vision_model.make(folder, layers=1, vision_layers=1, max_length=max_length)
    model = load_plain(str(folder))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embed_tokens" not in name and "position" not in name:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return str(folder)


def load_plain(path: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model as transformers alone loads it."""
    return AutoModelForImageTextToText.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


def draw(seed: int, width: int = 56, height: int = 56) -> EncodedImage:
    """Return an image of coloured noise in large squares."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize(
        (width, height), Image.Resampling.NEAREST
    )
    return read_image(to_bytes(image))


@torch.no_grad()
def plain_logp(
    model: PreTrainedModel,
    path: str,
    ids: Sequence[int],
    images: Sequence[PlacedImage],
    temperature: float = 1.0,
    banned: Sequence[int] = (),
) -> Tensor:
    """Return the log-probability of every token but the first, from one forward pass of one sequence."""
    media = {}
    if images:
        opened = [place.image.open() for place in images]
        grouped = opened if model.config.model_type.startswith("qwen") else [opened]
        made = AutoImageProcessor.from_pretrained(path)(images=grouped, return_tensors="pt")
        media = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in made.items()}
    tokens = torch.tensor([[*ids]])
    media.pop("num_crops", None)
    media.pop("num_soft_tokens_per_image", None)
    if "image_grid_thw" in media:  # transformers makes the positions of such families of it
        media["mm_token_type_ids"] = (tokens == model.config.image_token_id).int()
    if images and (name := TYPES.get(model.config.model_type)):
        media[name] = (tokens == model.config.image_token_id).int()
    logits = model(input_ids=tokens, **media).logits[0].float() / temperature
    logits[:, list(banned)] = -torch.inf
    scores = logits.log_softmax(-1)
    return scores[:-1].gather(-1, tokens[0, 1:, None])[:, 0]


def gap_of_sample(
    model: PreTrainedModel, path: str, sample: Sample, temperature: float = 1.0, banned: Sequence[int] = ()
) -> float:
    """Return the largest difference of a sample's log-probabilities from those of plain transformers."""
    want = plain_logp(model, path, sample.token_ids.tolist(), sample.images, temperature, banned)
    chosen = torch.from_numpy(sample.action_mask.copy())[1:]
    return float((want - torch.from_numpy(sample.rollout_logp.copy())[1:])[chosen].abs().max())


def as_sample(prompt: Sequence[int], images: Sequence[PlacedImage], done: Completion) -> Sample:
    """Return a prompt with its completion."""
    given, n = len(prompt), len(done.token_ids)
    return make_sample(
        prompt=Prompt(id="p", messages=[]),
        token_ids=[*prompt, *done.token_ids],
        action_mask=[False] * given + [True] * n,
        rollout_logp=[0.0] * given + done.logp,
        versions=[-1] * given + done.versions,
        images=tuple(images),
    )


PARTS = [
    ("what is ", draw(1, 24, 40), " and what ", draw(2, 16, 16)),
    ("nothing to see",),
    (draw(3, 48, 32), "is this"),
]
"""Prompts for `write_ids`."""


def write_ids(processor: ImageProcessor, *parts: str | EncodedImage) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Return the tokens of a prompt for a model of unit_tests/helpers/seeing.py, and the places of its images."""
    ids: list[int] = []
    places: list[PlacedImage] = []
    for part in parts:
        if isinstance(part, str):
            ids += processor.tokenizer.encode(part, add_special_tokens=False)
            continue
        made = processor.expand(part)
        ids.append(START)
        places.append(PlacedImage(part, len(ids), len(ids) + len(made.ids), made.grid))
        ids += [*made.ids, END]
    return ids, tuple(places)
