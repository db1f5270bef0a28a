"""Tiny random models that see, one of each family, in folders that load; and samples with images, made by chance."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3ImageProcessorPil,
    Gemma4AudioConfig,
    Gemma4ImageProcessorPil,
    Idefics3ImageProcessorPil,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    SmolVLMImageProcessorPil,
)

from core.types.images import EncodedImage, PlacedImage, read_image
from core.types.samples import Group, Prompt, Sample, make_sample
from modeling.head import use_scoring_head
from modeling.images.processor import ImageProcessor
from modeling.images.vision import VISION_FAMILIES
from unit_tests.helpers.image_models import to_bytes

FAMILIES = sorted(VISION_FAMILIES)
FAST = ("idefics3", "qwen2_5_vl")
"""One family of each kind, for the fast tests."""
LATER = ("gemma3", "gemma4", "qwen2_vl")
"""Families for `make verify`: other tests cover what is their own, or a newer family does."""
MARKED = [
    pytest.param(f, marks=[] if f in FAST else pytest.mark.verify if f in LATER else pytest.mark.slow) for f in FAMILIES
]
"""All families, for parametrize."""
WITH_GRIDS = [family for family in FAMILIES if family.startswith("qwen")]
CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz0123456789"
MARKS = ["<pad>", "<end>", "<unk>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TILES = ["<image>", "<fake_token_around_image>", "<global-img>"]
CELLS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
GEMMA = ["<start_of_image>", "<image_soft_token>", "<end_of_image>", "<|image>", "<|image|>", "<image|>"]
SPECIALS = [*MARKS, *TILES, *CELLS, *GEMMA]
FIRST = len(SPECIALS)
"""The first id of a character; all before it are marks."""
VOCABULARY = FIRST + len(CHARACTERS)
IMAGE = {True: SPECIALS.index("<|image_pad|>"), False: SPECIALS.index("<image>")}
SOFT = {"gemma3": SPECIALS.index("<image_soft_token>"), "gemma4": SPECIALS.index("<|image|>")}
TYPES = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}
"""Input of transformers for families whose tokens of an image attend to each other."""
START, END = SPECIALS.index("<|vision_start|>"), SPECIALS.index("<|vision_end|>")
PROPORTIONS = [(16, 16), (32, 16), (16, 32), (24, 40), (48, 32)]
"""Sizes of images, in pixels."""


def make_config(family: str) -> Any:
    """Two layers of each part; the hidden size of the language part is twice that of the tower."""
    text: dict[str, Any] = {
        **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512},
        **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1},
    }
    if family in SOFT:
        return _make_gemma(family, text)
    if family not in WITH_GRIDS:
        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        return AutoConfig.for_model(
            family,
            text_config=text | {"model_type": "llama"},
            vision_config=vision | {"image_size": 16, "patch_size": 4},
            **{"scale_factor": 2, "image_token_id": IMAGE[False], "pad_token_id": 0},
        )
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    if family in ("qwen2_vl", "qwen2_5_vl"):
        del text["head_dim"]
    if family == "qwen3_5":  # heads of 128 are the only ones of vLLM's kernel for CPUs
        text |= {"linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 128}
        text |= {"linear_value_head_dim": 128, "layer_types": ["linear_attention", "full_attention"]}
    shape = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    own = {
        "qwen2_vl": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        "qwen2_5_vl": {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 16}
        | {"fullatt_block_indexes": [1]},
        "qwen3_vl": {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 64}
        | {"deepstack_visual_indexes": [0]},
        "qwen3_5": {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 64},
    }[family]
    marks = {"image_token_id": IMAGE[True], "video_token_id": SPECIALS.index("<|video_pad|>")}
    marks |= {"vision_start_token_id": START, "vision_end_token_id": END}
    return AutoConfig.for_model(family, text_config=text, vision_config=shape | own, **marks)


def _make_gemma(family: str, text: dict[str, Any]) -> Any:
    """Windows shorter than the sequences; an image is 4 tokens, or up to 70."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12, "query_pre_attn_scalar": 32}
    if family == "gemma3":
        vision |= {"image_size": 16, "patch_size": 4, "vision_use_head": False}
        begin, end = map(SPECIALS.index, ("<start_of_image>", "<end_of_image>"))
        marks = {"boi_token_index": begin, "eoi_token_index": end}
        marks |= {"image_token_index": SOFT[family], "mm_tokens_per_image": 4}
        return AutoConfig.for_model(family, text_config=text, vision_config=vision, **marks)
    vision |= {"patch_size": 4, "head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 64}
    vision |= {"default_output_length": 70}  # in the files of released models, and read by vLLM alone
    own = {"global_head_dim": 64, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY}
    own |= {"sliding_window": 40, "use_bidirectional_attention": "vision"}
    marks = {"boi_token_id": SPECIALS.index("<|image>"), "eoi_token_id": SPECIALS.index("<image|>")}
    # no tokens of the vocabulary: other media are not tried
    marks |= {"image_token_id": SOFT[family], "video_token_id": 1000, "audio_token_id": 1001, "boa_token_id": 1002}
    return AutoConfig.for_model(family, text_config=text | own, vision_config=vision, **marks, eoa_token_index=1003)


def make_small_gemma4() -> PreTrainedModel:
    """A random Gemma 4 as its small models: causal, with bounds in the tower, shared keys, and a part for sound."""
    torch.manual_seed(0)
    config = make_config("gemma4")
    text: Any = config.get_text_config()
    kinds = ["sliding_attention", "full_attention"] * 2
    again = text.to_dict() | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": kinds}
    again |= {"use_bidirectional_attention": None, "final_logit_softcapping": 30.0, "use_double_wide_mlp": True}
    del again["per_layer_config"]
    config.text_config = type(text)(**again, global_head_dim=64)
    config.vision_config.use_clipped_linears = True
    sound = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 24}
    config.audio_config = Gemma4AudioConfig(**sound, subsampling_conv_channels=(8, 4))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=0.5 if "embed" in name and "input_proj" not in name else p[0].numel() ** -0.5)
            else:
                p.add_(torch.randn_like(p) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("input_max", "output_max")):
                buffer.fill_(1.5)
            elif name.endswith(("input_min", "output_min")):
                buffer.fill_(-1.0)
            elif name.endswith("layer_scalar"):
                buffer.fill_(0.7)
        model.get_submodule("model.language_model.norm").weight.mul_(0.2)
    return model.eval()


def make_tokenizer(family: str = "") -> PreTrainedTokenizerFast:
    """One token per character and per mark. That of gemma4 has the names that vLLM's processor reads."""
    specials = [token.replace("video_pad", "video") for token in SPECIALS] if family == "gemma4" else SPECIALS
    vocabulary = {token: i for i, token in enumerate([*specials, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    named = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    if family == "gemma4":
        named |= {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
        # around sound, which is never given
        named |= {"boa_token": "<|vision_start|>", "eoa_token": "<|vision_end|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=specials[3:], **named)


def make_model(family: str, attention: str = "sdpa") -> nn.Module:
    """A random model of the family, whose features are as large as its embeddings, so that images matter."""
    torch.manual_seed(0)
    config = make_config(family)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=p[0].numel() ** -0.5 if "embed" not in name or "patch" in name else 0.5)
    use_scoring_head(model)
    return model.eval()


def save_model(folder: Path, family: str) -> str:
    """Save model, tokenizer and processor."""
    make_model(family).save_pretrained(folder)
    make_tokenizer(family).save_pretrained(folder)
    images: Any
    if family == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, do_pan_and_scan=False)
        (folder / "processor_config.json").write_text('{"image_seq_length": 4}', encoding="utf-8")
    elif family == "gemma4":
        images = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=3)
    elif family in WITH_GRIDS:
        sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
        images = Qwen2VLImageProcessorPil(**sizes, size={"shortest_edge": 64, "longest_edge": 4096})
    else:
        kind: Any = Idefics3ImageProcessorPil if family == "idefics3" else SmolVLMImageProcessorPil
        images = kind(size={"longest_edge": 48}, max_image_size={"longest_edge": 16}, do_image_splitting=True)
        (folder / "processor_config.json").write_text('{"image_seq_len": 4}', encoding="utf-8")
    images.save_pretrained(folder)
    return str(folder)


def draw_image(seed: int, size: tuple[int, int] = (16, 16)) -> EncodedImage:
    """Noise, which no two images share."""
    rng = random.Random(seed)
    return read_image(to_bytes(Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1]))))


@dataclass(frozen=True)
class Reply:
    """Tokens that the policy chose."""

    ids: list[int]


def join_parts(processor: ImageProcessor, parts: list[list[int] | EncodedImage | Reply], *, group: int = 0) -> Sample:
    """A sample of text, images and replies."""
    ids: list[int] = []
    mask: list[bool] = []
    images: list[PlacedImage] = []
    for part in parts:
        if isinstance(part, EncodedImage):
            own = processor.expand(part)
            around = ([START], [END]) if own.grid else ([], [])
            begin = len(ids) + len(around[0])
            place = PlacedImage(image=part, begin=begin, end=begin + len(own.ids), grid=own.grid)
            images.append(place)
            new = [*around[0], *own.ids, *around[1]]
        else:
            new = part.ids if isinstance(part, Reply) else part
        ids += new
        mask += [isinstance(part, Reply)] * len(new)
    rng = random.Random(repr(ids))
    return make_sample(
        prompt=Prompt(id=str(group), messages=[]),
        token_ids=ids,
        action_mask=mask,
        rollout_logp=[-4.0 + rng.gauss(0, 0.2) if m else 0.0 for m in mask],
        versions=[0 if m else -1 for m in mask],
        reward=float(rng.random() < 0.5),
        advantage=[rng.gauss(0, 1)] * len(ids),
        images=tuple(images),
    )


def some_text(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(FIRST, VOCABULARY) for _ in range(n)]


def seeing_groups(processor: ImageProcessor, *, seed: int = 0) -> list[Group]:
    """Groups that share prompts with images; two samples differ in nothing but a later image; one group is text."""
    rng = random.Random(seed)
    sizes = iter(PROPORTIONS)
    one, two, three = (draw_image(seed + n, next(sizes)) for n in range(3))
    left, right = (draw_image(seed + n, (24, 40)) for n in (10, 11))
    prompt = [some_text(rng, 3), one, some_text(rng, 2), two, some_text(rng, 4)]
    said, then, last = Reply(some_text(rng, 5)), some_text(rng, 2), Reply(some_text(rng, 6))
    first = [
        [*prompt, said],
        [*prompt, Reply(some_text(rng, 8))],
        [*prompt, said, then, left, then, last],
        [*prompt, said, then, right, then, last],
        [*prompt, said, then, left, then, Reply(some_text(rng, 3))],
    ]
    text = some_text(rng, 6)
    second = [[text, Reply(some_text(rng, n))] for n in (3, 7)]
    third = [
        [some_text(rng, 2), three, Reply(some_text(rng, 3)), some_text(rng, 1), one, then, Reply(some_text(rng, 4))],
        [some_text(rng, 4), three, Reply(some_text(rng, 2)), then, left],
    ]
    return [
        [join_parts(processor, parts, group=g) for parts in group] for g, group in enumerate((first, second, third))
    ]


def plain_inputs(model: nn.Module, processor: ImageProcessor, sample: Sample) -> dict[str, Any]:
    """What transformers itself takes for one sequence, without its last token where that is an image's."""
    from data_feeds.packing.inputs import count_inputs, list_inputs

    ids = torch.tensor(sample.token_ids[: count_inputs(sample)].astype("int64"))[None]
    hf: Any = model
    inputs: dict[str, Any] = {"input_ids": ids}
    seen = [place.image for place in list_inputs(sample)]
    if seen:
        media = processor.collate(seen)
        inputs |= {name: x.to(hf.dtype) if x.is_floating_point() else x for name, x in media.items()}
        if "image_grid_thw" in media:
            inputs["mm_token_type_ids"] = (ids == hf.config.image_token_id).int()
        if hf.config.model_type in SOFT:
            inputs[TYPES[hf.config.model_type]] = (ids == hf.config.image_token_id).int()
    return inputs


def plain_logp(model: nn.Module, processor: ImageProcessor, sample: Sample, temperature: float) -> torch.Tensor:
    """Log-probabilities of the trained tokens by transformers alone: one sequence, all logits."""
    logits = model(**plain_inputs(model, processor, sample)).logits[0] / temperature
    trained = [t for t, yes in enumerate(sample.loss_mask) if yes]
    logp = logits.double().log_softmax(-1)
    return torch.stack([logp[t - 1, sample.token_ids[t]] for t in trained])
