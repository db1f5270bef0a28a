"""The image processor of one small model: tokens of images in texts, what is refused, and heads of reward models."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from core.errors import RunStopped, UserError
from core.hub import describe_hub
from core.types.images import ImageRefused, PlacedImage
from core.types.samples import Batch
from modeling.hf_config import read_config
from modeling.images.cache import MOST_KEPT, CachedImage, ImageCache
from modeling.images.gemma import Pools
from modeling.images.media import ImageMedia, make_blank
from modeling.images.processor import ImageProcessor
from modeling.images.vision_scalar import scalar_class, with_scalar_head
from modeling.media import MediaLoader
from modeling.probe_rows import make_batch
from unit_tests.helpers import seeing
from unit_tests.helpers.seeing import draw_image

SMALL, WIDE = draw_image(1), draw_image(2, (32, 16))
MARK, WHOLE = "<fake_token_around_image>", "<global-img>"
BEGIN = f"{MARK}<row_1_col_1>{'<image>' * 4}{MARK}<row_1_col_2><image>"


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("sees")
    path = seeing.save_model(folder, "idefics3")
    (folder / "model.safetensors").unlink()  # no test here reads a weight
    return path


@pytest.fixture(scope="module")
def processor(path) -> ImageProcessor:
    return ImageProcessor(path)


def edited(path: str, folder: Path, file: str, **changes: Any) -> str:
    """A copy of a model folder with some values of a file changed."""
    shutil.copytree(path, folder)
    there = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps(there | changes))
    return str(folder)


def refusal(kind: type[Exception], call: Any, *args: Any, **given: Any) -> str:
    with pytest.raises(kind) as refused:
        call(*args, **given)
    return str(refused.value)


def test_an_image_is_written_as_its_tokens(processor):
    ids = processor.tokenizer.get_vocab()
    one, text = processor.expand(SMALL), processor.family.write((3, 3))
    assert (one.text, one.written, one.grid) == (text, text, None) and text.startswith(BEGIN)
    assert one.ids[:6] == (ids[MARK], ids["<row_1_col_1>"], *[ids["<image>"]] * 4) and one.ids[-1] == ids[MARK]
    assert len(one.ids) == 9 * 6 + 3 + 1 + 7, "nine tiles, ends of lines, and the whole"
    assert processor.expand(draw_image(3)) is one, "the tokens depend on the size alone"
    assert (processor.placeholder, processor.placeholder_id) == ("<image>", ids["<image>"])
    cells = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    assert processor.reserved == ("<image>", MARK, WHOLE, *cells)
    assert processor.placeholder_ids == {ids[text] for text in processor.reserved}
    assert processor.who == f"model.path={processor.path}" and processor.chat_template is None


def test_a_text_that_holds_a_token_of_images_is_refused_wherever_it_stands(processor):
    good = {"role": "user", "content": "image, <imag"}
    processor.check_texts([good], [])
    processor.check_texts([good, {**good, "reasoning": "no", "tool_calls": [{"id": "a"}]}], [{"name": "look"}])
    for part in (
        {"content": "an <image>"},
        {"content": "a", "reasoning": "the <image>"},
        {"content": "a", "tool_calls": [{"function": {"name": "see", "arguments": {"a": "<image>"}}}]},
    ):
        assert refusal(ImageRefused, processor.check_texts, [good, {"role": "assistant", **part}], []) == (
            "a text holds '<image>', which stands for an image in this model: write an image as a part {type: image}"
        )
    told = refusal(ImageRefused, processor.check_texts, [good], [{"name": "look", "description": f"a {WHOLE}"}])
    assert told == f"a tool holds {WHOLE!r}, which stands for an image in this model"


def test_placeholders_become_tokens_and_tokens_have_places(processor):
    text = processor.insert_tokens("a<image>b<image>", [SMALL, WIDE])
    small, wide = processor.expand(SMALL), processor.expand(WIDE)
    assert text == f"a{small.text}b{wide.text}" and processor.insert_tokens("ab", []) == "ab"
    for count, images in ((2, [SMALL]), (2, [SMALL] * 3), (0, [SMALL])):
        assert refusal(ImageRefused, processor.insert_tokens, "c" + "<image>" * count, images) == (
            f"the chat template writes {count} times '<image>' for {len(images)} images: use a model or a template "
            "that writes every image once"
        )
    ids = processor.tokenizer.encode(text, add_special_tokens=False)
    assert (len(small.ids), len(wide.ids)) == (65, 46)
    first, second = PlacedImage(SMALL, 1, 66, None), PlacedImage(WIDE, 67, 113, None)
    assert processor.place_images(ids, [SMALL, WIDE], 0) == (first, second)
    assert processor.place_images(ids, [WIDE], 66) == (second,) and processor.place_images([60, 61], [], 0) == ()
    told = "there are tokens of 2 images, and 3 images"
    assert refusal(ImageRefused, processor.place_images, ids, [SMALL, WIDE, SMALL], 0) == told
    told = "the tokens from 67 on are not those of image 2 of 2, which has 16 x 16 pixels"
    assert refusal(ImageRefused, processor.place_images, ids, [SMALL, SMALL], 0) == told
    told = "token 67 stands for an image, and there are only 1 images before it"
    assert refusal(ImageRefused, processor.place_images, ids, [SMALL], 0) == told


def test_an_image_is_processed_once_for_the_same_settings(processor, path, tmp_path, monkeypatch):
    monkeypatch.setattr("modeling.images.processor.CACHE", ImageCache(2**20))
    made = processor.process(SMALL)
    again = ImageProcessor(path, tokenizer=processor.tokenizer)
    assert again.tokenizer is processor.tokenizer and again.process(SMALL) is made
    other = ImageProcessor(edited(path, tmp_path / "other", "preprocessor_config.json", image_mean=[0.1, 0.2, 0.3]))
    assert other.process(SMALL) is not made and processor.process(WIDE) is not made
    both = processor.collate([WIDE, SMALL])
    want = torch.cat([processor.process(image)["pixel_values"] for image in (WIDE, SMALL)])[None]
    assert torch.equal(both["pixel_values"], want) and processor.collate([]) == {}
    copied = pickle.loads(pickle.dumps(processor))
    assert copied.expand(WIDE) == processor.expand(WIDE) and copied.process(SMALL) is made


def test_an_image_that_is_cut_otherwise_or_not_at_all_is_refused(path, monkeypatch):
    monkeypatch.setattr("modeling.images.processor.CACHE", ImageCache(2**20))
    processor = ImageProcessor(path, key="k")
    monkeypatch.setattr(processor.family, "count", lambda width, height: (2, 1))
    assert refusal(RunStopped, processor.process, SMALL) == (
        f"k={path}: its processor cuts 16 x 16 pixels into (3, 3), and (2, 1) was expected: install the version of "
        "transformers that constraints.txt names"
    )

    def fail(**_given: Any) -> None:
        raise ValueError("too wide")

    monkeypatch.setattr(processor, "images", fail)
    assert refusal(ImageRefused, processor.process, WIDE) == "the model's processor refuses the image (too wide)"


def test_the_files_of_a_processor_are_copied(processor, path, tmp_path):
    processor.save(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"preprocessor_config.json", "processor_config.json"}
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (Path(path) / file.name).read_bytes()


def test_a_template_of_the_processor_may_have_a_name(path, tmp_path):
    for name, given, found in (("one", "x", "x"), ("two", {"default": "y", "other": "z"}, "y"), ("three", {}, None)):
        folder = edited(path, tmp_path / name, "processor_config.json", chat_template=given)
        assert ImageProcessor(folder).chat_template == found


def test_what_is_no_processor_of_the_model_is_told_by_key_and_path(path, tmp_path):
    wrong = edited(path, tmp_path / "token", "config.json", image_token_id=3)
    assert refusal(UserError, ImageProcessor, wrong, key="k") == (
        f"k={wrong}: its images are the token 3, and its tokenizer has '<image>' as 7: take config and tokenizer of "
        "one model"
    )
    (tmp_path / "token" / "preprocessor_config.json").unlink()
    told = refusal(UserError, ImageProcessor, wrong, key="k")
    assert told.startswith(f"k={wrong}: its image processor cannot be loaded: ")
    assert told.endswith(": save the model with its preprocessor_config.json")
    ids: list[int] = []
    lacking = SimpleNamespace(get_vocab=lambda: {"<image>": 7}, encode=lambda text, add_special_tokens: ids)
    processor = ImageProcessor(path, key="k", tokenizer=lacking)
    assert processor.reserved == ("<image>",) and processor.placeholder_ids == {7}
    lacks = f"its tokenizer lacks tokens of images: it reads {processor.family.write((3, 3))[:60]!r} as text"
    for wrong_ids in ([], [60, 7], [7, 60], [60, 7, 60]):
        ids[:] = wrong_ids
        assert refusal(UserError, processor.expand, SMALL) == f"k={path}: {lacks}"
    ids[:] = [7, 60, 7]
    assert processor.expand(SMALL).ids == (7, 60, 7)


def test_a_processor_that_is_not_in_the_cache_names_the_hub(path, monkeypatch):
    """The config may be in the cache, and the processor not."""
    config = read_config(path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("modeling.images.processor.read_config", lambda *_, **__: config)
    told = refusal(UserError, ImageProcessor, "nobody/none", key="k")
    assert told.startswith("k=nobody/none: its image processor cannot be loaded: ")
    assert told.endswith(f": save the model with its preprocessor_config.json; {describe_hub()}")


def test_a_pool_that_would_have_no_size_is_refused():
    images = SimpleNamespace(patch_size=2, pooling_kernel_size=3, max_soft_tokens=4, do_resize=True)
    vision = SimpleNamespace(patch_size=2, pooling_kernel_size=3)
    named = SimpleNamespace(image_token="I", boi_token="B", eoi_token="E", audio_token="A")
    pools = Pools(images, named, SimpleNamespace(vision_config=vision), {}, "m=x")
    assert (pools.placeholder, pools.token, pools.write((1, 2))) == ("I", "I", "BIIE")
    assert pools.reserved == ("I", "B", "E", "<|video|>", "A")
    images.max_soft_tokens = 0
    told = refusal(ImageRefused, pools.count, 60, 60)
    assert told.startswith("the model's processor refuses the image (Attempting to resize to a 0 x 0 image.")


def seeing_batch(processor: ImageProcessor, *images: Any) -> Batch:
    ids = [token for image in images for token in (50, *processor.expand(image).ids)]
    return replace(make_batch([torch.tensor([*ids, 51, 52])]), images=images)


def test_media_have_the_models_dtype_and_fit_the_tokens(path):
    model: Any = SimpleNamespace(config=read_config(path), dtype=torch.bfloat16)
    loader = MediaLoader(model, path, device="cpu")
    assert loader.images is not None and loader.images.dtype == torch.bfloat16
    wide = MediaLoader(model, path, device="cpu", dtype=torch.float64)
    processor = loader.images.processor
    batch = seeing_batch(processor, SMALL, WIDE)
    plain = processor.collate([SMALL, WIDE])
    for made, dtype in ((loader.load(batch), torch.bfloat16), (wide.load(batch), torch.float64)):
        assert made.media.keys() == plain.keys() and made.images == (SMALL, WIDE)
        assert torch.equal(made.media["pixel_values"], plain["pixel_values"].to(dtype))
        assert all(x.is_floating_point() or x.dtype == plain[name].dtype for name, x in made.media.items())
    text = loader.load(make_batch([torch.tensor([50, 51])]))
    assert text.images == (make_blank(),)
    blank = processor.collate([make_blank()])["pixel_values"]
    assert torch.equal(text.media["pixel_values"], blank.to(torch.bfloat16))
    ids = batch.input_ids.clone()
    ids[(ids == model.config.image_token_id).nonzero()[0]] = 50
    media = ImageMedia(model, path, dtype=torch.float32)
    assert refusal(RunStopped, media.add_media, replace(batch, input_ids=ids)) == (
        "a micro-batch holds 67 tokens that stand for images, and its 2 images fill 68: a sample's tokens do not fit "
        "its images"
    )


def test_images_are_loaded_for_a_known_family_alone(path):
    model: Any = SimpleNamespace(config=read_config(path), dtype=torch.float32)
    batch = make_batch([torch.tensor([50, 51])])
    text: Any = SimpleNamespace(config=SimpleNamespace(vision_config=None), dtype=torch.float32)
    for loader in (MediaLoader(model, path, device="cpu", images="off"), MediaLoader(text, path, device="meta")):
        assert loader.images is None
        loaded = loader.load(batch)
        assert loaded.media == {} and loaded.input_ids.device.type == loader.device
        assert refusal(UserError, loader.load, replace(batch, images=(SMALL,))) == (
            f"model.path={path} is a text model, or used as one here, and a sample has images"
        )


def test_a_reward_model_that_sees_has_the_dtype_and_one_label():
    model: Any = seeing.make_model("idefics3").bfloat16()
    body, config = model.model, model.config
    scalar: Any = with_scalar_head(model)
    assert type(scalar) is scalar_class("idefics3") and type(scalar).__name__ == "Idefics3ForSequenceClassification"
    assert scalar.model is body and scalar.config is config and config.num_labels == 1
    assert scalar.score.weight.shape == (1, 64) and scalar.score.weight.dtype == torch.bfloat16
    assert type(scalar).__module__ == "modeling.images.vision_scalar"
    with torch.device("meta"):
        assert type(AutoModelForSequenceClassification.from_config(config)) is type(scalar), "it is registered"
    assert scalar.score.bias is None and not any(p.is_meta for p in scalar.parameters())


def test_the_cache_of_a_process_holds_half_a_gibibyte():
    cache = ImageCache(MOST_KEPT)
    for name, size in (("a", 2**28), ("b", 2**28)):
        cache.add("s", name, CachedImage({"x": torch.empty(size, dtype=torch.uint8, device="meta")}, (1, 1)))
    assert all(cache.find("s", name) for name in "ab")
    cache.add("s", "c", CachedImage({"x": torch.empty(1, dtype=torch.uint8, device="meta")}, (1, 1)))
    assert cache.find("s", "a") is None and cache.find("s", "b") and cache.find("s", "c")
