"""How each family writes an image: the text, its rows and columns, and what does not fit together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.errors import UserError
from core.types.images import ImageRefused
from modeling.image_blocks import find_image_blocks
from modeling.images.families import Patches, Tiles
from modeling.images.gemma import Pools, Squares
from modeling.images.vision import VISION_FAMILIES, VisionFamily

NOBODY = SimpleNamespace()
"""Tokenizer without names of its own for the tokens of images."""
ASIDE = ": take config and processor of one model"


def make_tiles(*, processor: dict[str, Any] | None = None, tokenizer: Any = NOBODY, **images: Any) -> Tiles:
    given = {"max_image_size": {"longest_edge": 20}, "do_image_splitting": True, "do_resize": False} | images
    config = SimpleNamespace(vision_config=SimpleNamespace(patch_size=5), scale_factor=2)
    return Tiles(SimpleNamespace(**given), tokenizer, config, {"image_seq_len": 4} | (processor or {}), "m=x")


def test_tiles_are_counted_by_rows_and_columns_of_whole_edges():
    sizes = [(20, 20), (21, 20), (20, 21), (40, 20), (41, 19), (60, 20), (60, 21), (30, 61), (5, 5), (100, 1), (19, 39)]
    tiles = make_tiles()
    assert [tiles.count(*size) for size in sizes] == [
        *[(0, 0), (2, 2), (2, 2), (1, 2), (2, 3), (1, 3), (2, 3), (4, 2), (0, 0), (1, 5), (2, 1)]
    ]
    assert make_tiles(do_image_splitting=False).count(100, 1) == (0, 0)
    fixed = {"size": {"longest_edge": 0, "height": 40, "width": 60}}
    assert make_tiles(do_resize=True, **fixed).count(5, 5) == (2, 3)
    assert make_tiles(do_resize=True, size={"longest_edge": 80}).count(10, 20) == (4, 2)


def test_tiles_are_written_between_marks_row_by_row_and_then_the_whole():
    tiles = make_tiles()
    tile, mark = "<image>" * 4, "<fake_token_around_image>"
    whole = f"{mark}<global-img>{tile}{mark}"
    assert tiles.write((0, 0)) == whole
    assert tiles.write((2, 1)) == f"{mark}<row_1_col_1>{tile}\n{mark}<row_2_col_1>{tile}\n\n{whole}"
    assert tiles.write((1, 2)) == f"{mark}<row_1_col_1>{tile}{mark}<row_1_col_2>{tile}\n\n{whole}"
    cells = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    assert tiles.reserved == ("<image>", mark, "<global-img>", *cells)
    assert (tiles.placeholder, tiles.token, tiles.around, tiles.find_grid((2, 1))) == ("<image>", "<image>", "", None)
    named = SimpleNamespace(image_token="I", fake_image_token="F", global_image_token="G")
    assert make_tiles(tokenizer=named).write((0, 0)) == "FGIIIIF"


@pytest.mark.parametrize(("processor", "written"), [({"image_seq_len": 3}, 3), ({"image_seq_len": 5}, 5), ({}, 169)])
def test_a_tile_has_as_many_tokens_as_features(processor, written):
    config = SimpleNamespace(vision_config=SimpleNamespace(patch_size=5), scale_factor=2)
    images = SimpleNamespace(max_image_size={"longest_edge": 20})
    with pytest.raises(UserError) as refused:
        Tiles(images, NOBODY, config, processor, "m=x")
    assert str(refused.value) == (
        f"m=x: its processor writes {written} tokens for a tile of 20 pixels, and its model makes 4 of it{ASIDE}"
    )


def test_what_the_processor_of_tiles_returns_is_read():
    tiles, mask = make_tiles(), torch.ones(1, 2, 4, 4)
    pixels = torch.ones(1, 2, 3, 4, 4)
    found = {"pixel_values": pixels, "pixel_attention_mask": mask, "rows": [[2]], "cols": [[3]]}
    tensors, cut = tiles.read(found)
    assert cut == (2, 3) and {name: tuple(t.shape) for name, t in tensors.items()} == {
        "pixel_values": (2, 3, 4, 4),
        "pixel_attention_mask": (2, 4, 4),
    }
    pixels[0, 1] = 0
    with pytest.raises(ImageRefused) as refused:
        tiles.read(found)
    assert str(refused.value) == (
        "the model's processor makes zeros of the image or of a tile of it, which the model takes for padding"
    )
    pixels[0, 1, 2, 3, 3] = 0.1
    assert tiles.read({"pixel_values": pixels, "rows": [[1]], "cols": [[1]]})[0].keys() == {"pixel_values"}
    plain = {"pixel_values": torch.ones(1, 3, 2, 2)}
    assert tiles.collate([plain, plain]).keys() == {"pixel_values"}
    joined = tiles.collate([plain, {"pixel_values": torch.ones(1, 3, 1, 3)}])
    assert joined["pixel_values"][0, :, 0].tolist() == [
        [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]],
        [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]],
    ]
    assert joined["pixel_attention_mask"].tolist() == joined["pixel_values"][:, :, 0].long().tolist()


def make_patches(**images: Any) -> Patches:
    own = {"patch_size": 2, "merge_size": 3, "temporal_patch_size": 2, "do_resize": False} | images
    vision = SimpleNamespace(patch_size=2, spatial_merge_size=3, temporal_patch_size=2)
    return Patches(SimpleNamespace(**own), NOBODY, SimpleNamespace(vision_config=vision), {}, "m=x")


def test_patches_are_merged_to_tokens_in_a_grid():
    patches = make_patches()
    assert patches.count(12, 18) == (9, 6) and patches.find_grid((9, 6)) == (3, 2)
    assert patches.write((9, 6)) == "<|image_pad|>" * 6
    assert patches.reserved == ("<|image_pad|>", "<|video_pad|>") and patches.around == ""
    resized = make_patches(do_resize=True, size={"shortest_edge": 144, "longest_edge": 300})
    assert [resized.count(*size) for size in ((6, 6), (12, 18), (60, 60), (100, 10))] == [
        *[(6, 6), (9, 6), (6, 6), (3, 27)]
    ]
    with pytest.raises(ImageRefused) as refused:
        resized.count(1, 300)
    assert str(refused.value).startswith("the model's processor refuses the image (absolute aspect ratio must be")
    grids = [torch.tensor([[1, 4, 6]]), torch.tensor([[1, 2, 2]])]
    found = [{"pixel_values": torch.ones(int(g.prod()), 2), "image_grid_thw": g, "other": 1} for g in grids]
    each = [patches.read(one) for one in found]
    assert [cut for _, cut in each] == [(4, 6), (2, 2)]
    joined = patches.collate([tensors for tensors, _ in each])
    assert joined["image_grid_thw"].tolist() == [[1, 4, 6], [1, 2, 2]] and joined["pixel_values"].shape == (28, 2)
    assert joined.keys() == {"image_grid_thw", "pixel_values"}


@pytest.mark.parametrize("name", ["patch_size", "merge_size", "temporal_patch_size"])
def test_patches_of_another_size_than_the_models_are_refused(name):
    with pytest.raises(UserError) as refused:
        make_patches(**{name: 7})
    wanted = {"patch_size": 2, "merge_size": 3, "temporal_patch_size": 2}[name]
    assert str(refused.value) == f"m=x: its processor has {name}=7, and its model {wanted}{ASIDE}"


def make_squares(*, processor: dict[str, Any] | None = None, tokenizer: Any = NOBODY, **images: Any) -> Squares:
    own = {"size": {"height": 8, "width": 8}, "do_pan_and_scan": False} | images
    config = SimpleNamespace(mm_tokens_per_image=4, vision_config=SimpleNamespace(image_size=8))
    given = {"image_seq_length": 4} if processor is None else processor
    return Squares(SimpleNamespace(**own), tokenizer, config, given, "m=x")


def test_a_square_of_gemma_has_its_tokens_between_two_marks():
    squares = make_squares()
    assert squares.count(100, 3) == (1, 4) and squares.find_grid((1, 4)) is None
    assert squares.write((1, 4)) == f"<start_of_image>{'<image_soft_token>' * 4}<end_of_image>"
    assert squares.reserved == ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
    assert (squares.around, squares.settings) == ("\n\n", {"do_pan_and_scan": False})
    named = SimpleNamespace(boi_token="B", image_token="I", eoi_token="E")
    assert make_squares(tokenizer=named).write((1, 4)) == "BIIIIE"
    tensors, cut = squares.read({"pixel_values": torch.ones(1, 2), "num_crops": 0})
    assert cut == (1, 4) and squares.collate([tensors, tensors])["pixel_values"].shape == (2, 2)
    for changes, told in (
        ({"processor": {"image_seq_length": 5}}, "5 tokens of an image of 8 x 8 pixels"),
        ({"processor": {}}, "256 tokens of an image of 8 x 8 pixels"),
        ({"size": {"height": 9, "width": 8}}, "4 tokens of an image of 9 x 8 pixels"),
        ({"size": {"height": 8, "width": 9}}, "4 tokens of an image of 8 x 9 pixels"),
    ):
        with pytest.raises(UserError) as refused:
            make_squares(**changes)
        assert str(refused.value) == f"m=x: its processor makes {told}, and its model takes 4 of 8 x 8{ASIDE}"
    with pytest.raises(UserError) as refused:
        make_squares(do_pan_and_scan=True)
    assert str(refused.value) == (
        "m=x: its processor cuts crops out of long images (pan and scan), which is not supported: set do_pan_and_scan "
        "to false in its preprocessor_config.json"
    )


def make_pools(**images: Any) -> Pools:
    own = {"patch_size": 2, "pooling_kernel_size": 3, "max_soft_tokens": 4, "do_resize": False} | images
    vision = SimpleNamespace(patch_size=2, pooling_kernel_size=3)
    return Pools(SimpleNamespace(**own), NOBODY, SimpleNamespace(vision_config=vision), {}, "m=x")


def test_a_pool_of_gemma_keeps_the_proportions_of_its_image():
    pools = make_pools()
    assert pools.count(12, 18) == (3, 2) and pools.find_grid((3, 2)) is None
    assert pools.write((3, 2)) == f"<|image>{'<|image|>' * 6}<image|>"
    assert pools.reserved == ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>") and pools.around == ""
    resized = make_pools(do_resize=True)
    assert [resized.count(*size) for size in ((6, 6), (12, 18), (40, 10))] == [(2, 2), (2, 1), (1, 4)]
    places = torch.tensor([[[x, y] for y in range(3) for x in range(6)] + [[-1, -1]]])
    tensors, cut = pools.read({"pixel_values": torch.ones(1, 19, 2), "image_position_ids": places, "more": 0})
    assert cut == (1, 2) and tensors.keys() == {"pixel_values", "image_position_ids"}
    assert pools.collate([tensors, tensors])["image_position_ids"].shape == (2, 19, 2)
    for name in ("patch_size", "pooling_kernel_size"):
        with pytest.raises(UserError) as refused:
            make_pools(**{name: 7})
        wanted = {"patch_size": 2, "pooling_kernel_size": 3}[name]
        assert str(refused.value) == f"m=x: its processor has {name}=7, and its model {wanted}{ASIDE}"


PARTS = {
    "idefics3": ("model.vision_model.a", "model.connector.a", "model.text_model.a"),
    "smolvlm": ("model.vision_model.a", "model.connector.a", "model.text_model.a"),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"),
        ("model.visual.a", "model.visual.merger.a", "model.language_model.a"),
    ),
    "gemma3": ("model.vision_tower.a", "model.multi_modal_projector.a", "model.language_model.a"),
    "gemma4": ("model.vision_tower.a", "model.embed_vision.a", "model.language_model.a"),
}


def test_a_parameter_belongs_to_one_part():
    assert PARTS.keys() == VISION_FAMILIES.keys()

    def tell(family: VisionFamily, name: str) -> tuple[bool, bool, bool]:
        return family.in_tower(name), family.in_vision(name), family.in_language(name)

    for name, (tower, connector, language) in PARTS.items():
        family = VISION_FAMILIES[name]
        assert tell(family, tower) == (True, True, False) and tell(family, connector) == (False, True, False)
        assert tell(family, language) == (False, False, True)
        assert tell(family, "lm_head.weight") == tell(family, f"{family.tower}s.a") == (False, False, False)
    deep = "model.visual.deepstack_merger_list.a"
    assert [VISION_FAMILIES[name].in_tower(deep) for name in ("qwen3_vl", "qwen3_5")] == [False, True]
    kinds = {"gemma3": Squares, "gemma4": Pools, "idefics3": Tiles, "smolvlm": Tiles}
    assert {name: family.images for name, family in VISION_FAMILIES.items()} == {
        name: kinds.get(name, Patches) for name in VISION_FAMILIES
    }


@pytest.mark.parametrize(
    ("kind", "attends", "found"),
    [
        ("gemma3", None, ("token_type_ids", False)),
        ("gemma4", "vision", ("mm_token_type_ids", True)),
        ("gemma4", "all", None),
        ("qwen3_vl", "vision", None),
    ],
)
def test_images_of_gemma_attend_in_both_directions(kind, attends, found):
    text = SimpleNamespace(use_bidirectional_attention=attends)
    blocks = find_image_blocks(SimpleNamespace(model_type=kind, image_token_id=5, get_text_config=lambda: text))
    assert found == (None if blocks is None else (blocks.types, blocks.in_windows_only))
    assert blocks is None or blocks.token == 5
