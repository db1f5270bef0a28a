"""Folders of models that see, without weights: config, tokenizer, template and processor; and images for them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from core.types.images import EncodedImage, read_image
from core.types.messages import Message, Part
from data_prep import tiny_vision_model
from data_prep.tiny_model import make_tokenizer

SIDE = 28
"""Pixels of a tile; each is one token."""
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def save_idefics(folder: Path, *, splits: bool = False) -> str:
    """An Idefics3 whose processor makes one square of an image, or cuts it into up to 3 x 3 tiles."""
    tokenizer = make_tokenizer(images=True)
    tokenizer.add_tokens([f"<row_{r}_col_{c}>" for r in (1, 2, 3) for c in (1, 2, 3)], special_tokens=True)
    sizes = {"hidden_size": 32, "layers": 1, "vision_layers": 1, "side": SIDE, "patch": 14, "max_length": 512}
    tiny_vision_model.make_config(tokenizer, **sizes).save_pretrained(folder)
    processor = tiny_vision_model.make_processor(tokenizer, side=SIDE, tokens=1)
    processor.image_processor.do_image_splitting = splits
    processor.image_processor.size = {"longest_edge": 3 * SIDE if splits else SIDE}
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_qwen(folder: Path, family: str = "qwen2_5_vl") -> str:
    """A Qwen-VL of a family, with the names of its tokens."""
    from transformers import AutoConfig, Qwen2VLImageProcessorPil

    tokenizer = make_tokenizer()
    tokens = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
        "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    patch = 16 if family == "qwen3_vl" else 14
    config = AutoConfig.for_model(
        family,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        vision_config={"patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2},
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=patch, size={"shortest_edge": 4 * patch**2, "longest_edge": 100 * patch**2}
    ).save_pretrained(folder)
    return str(folder)


def draw_image(width: int = SIDE, height: int = SIDE, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(1, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def to_bytes(image: Image.Image, form: str = "PNG", **settings: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format=form, **settings)
    return file.getvalue()


def draw(width: int = SIDE, height: int = SIDE, seed: int = 0) -> EncodedImage:
    return read_image(to_bytes(draw_image(width, height, seed)))


def say(role: str, *parts: str | EncodedImage) -> Message:
    """A turn of texts and images."""
    listed: list[Part] = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return {"role": role, "content": "".join(p for p in parts if isinstance(p, str)), "parts": listed}
