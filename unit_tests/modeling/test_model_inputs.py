"""What a model gets of a batch, by layout and attention: rows, positions, borders, masks and places of tokens."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.types.routes import PADDING
from core.types.samples import Batch
from modeling.image_blocks import ImageEnds
from modeling.model_inputs import choose_padding, lay_out_part
from modeling.probe_rows import make_batch, make_shared_batch
from modeling.segments import Segments
from modeling.sequence_parallel import SequenceGroup

IMAGE = 9
WHOLE = make_batch([torch.tensor([3, 9, 9]), torch.tensor([4, 5])])
SHARED = make_shared_batch([torch.tensor(ids) for ids in ([3, 4], [5, 6], [7], [8, 9], [3])])
ROPE = torch.arange(15).view(3, 5)


def model_of(attention: str, *, kind: str = "llama", image: int | None = IMAGE, **config: Any) -> Any:
    text = SimpleNamespace(**{"_attn_implementation": attention, "model_type": kind, **config})
    return SimpleNamespace(
        config=SimpleNamespace(model_type=kind, image_token_id=image, get_text_config=lambda: text),
        dtype=torch.float32,
    )


def lay_out(model: Any, batch: Batch, layout: Any, group: SequenceGroup | None = None) -> dict[str, Any]:
    """Inputs and places as lists."""
    part = lay_out_part(model, batch, layout, group)
    inputs = {name: x.tolist() if isinstance(x, Tensor) else x for name, x in part.inputs.items()}
    return inputs | {"at": [x.tolist() for x in part.at], "labels": part.labels.tolist(), "mine": part.mine.tolist()}


PLACES = {"labels": [9, 9, 5], "mine": [True] * 3}
PADDED = {"input_ids": [[3, 9, 9], [4, 5, 0]], "at": [[0, 0, 1], [0, 1, 0]], **PLACES}
PACKED = {
    "input_ids": [[3, 9, 9, 4, 5]],
    "position_ids": [[0, 1, 2, 0, 1]],
    "at": [[0, 0, 0], [0, 1, 3]],
    **PLACES,
}
SEEN = [
    [True, False, False, False, False],
    [True, True, False, False, False],
    [True, True, True, False, False],
    [False, False, False, True, False],
    [False, False, False, True, True],
]


def test_a_padded_sequence_is_a_row_and_a_packed_one_has_borders():
    assert lay_out(model_of("sdpa"), WHOLE, "padded") == PADDED
    assert lay_out(model_of("by_sequence"), WHOLE, "padded") == PADDED | {"attention_mask": []}
    zero = PADDED | {"input_ids": [[3, 9, 9], [4, 5, 1]]}
    assert lay_out(model_of("sdpa", image=0), WHOLE, "padded") == zero
    assert [choose_padding(model_of("sdpa", image=image)) for image in (0, 1, None)] == [1, 0, 0]
    packed = lay_out(model_of("by_sequence"), WHOLE, "packed")
    segments = packed.pop("segments")
    assert packed == PACKED | {"attention_mask": []}
    assert isinstance(segments, Segments) and (segments.lengths, segments.parents) == ([3, 2], [-1, -1])
    empty = lay_out_part(model_of("by_sequence"), WHOLE, "packed", None).inputs["attention_mask"]
    assert empty.shape == (0, 0, 0, 0) and empty.dtype == torch.bool
    borders = {"cu_seq_lens_q": [0, 3, 5], "cu_seq_lens_k": [0, 3, 5], "max_length_q": 3, "max_length_k": 3}
    assert lay_out(model_of("flash_attention_2"), WHOLE, "packed") == PACKED | borders
    part = lay_out_part(model_of("flash_attention_2"), WHOLE, "packed", None)
    assert part.inputs["cu_seq_lens_q"].dtype == part.inputs["cu_seq_lens_k"].dtype == torch.int32
    assert lay_out(model_of("sdpa"), WHOLE, "packed") == PACKED | {"attention_mask": [[SEEN]]}
    added = [[[[0.0 if seen else -torch.inf for seen in row] for row in SEEN]]]
    assert lay_out(model_of("eager"), WHOLE, "packed") == PACKED | {"attention_mask": added}
    shared = lay_out(model_of("fixed_order"), SHARED, "packed")
    assert shared["position_ids"] == [[0, 1, 0, 1, 2, 2, 3, 0]] and shared["segments"].parents == [-1, -1, 1, 1, -1]


def test_positions_of_three_axes_are_laid_out_beside_the_texts():
    batch = replace(WHOLE, rope_ids=ROPE)
    padded = lay_out(model_of("sdpa"), batch, "padded")
    assert padded["position_ids"] == [[[0, 1, 2], [3, 4, 0]], [[5, 6, 7], [8, 9, 0]], [[10, 11, 12], [13, 14, 0]]]
    packed = lay_out(model_of("sdpa"), batch, "packed")
    assert packed["position_ids"] == [[[0, 1, 2, 0, 1]], *([row] for row in ROPE.tolist())]


@pytest.mark.parametrize(("attention", "layout"), [("sdpa", "padded"), ("eager", "padded")])
def test_image_tokens_that_see_each_other_are_marked_for_transformers(attention, layout):
    for kind, name, config in (
        ("gemma3", "token_type_ids", {}),
        ("gemma4", "mm_token_type_ids", {"use_bidirectional_attention": "vision"}),
    ):
        marked = lay_out(model_of(attention, kind=kind, **config), WHOLE, layout)
        assert marked == PADDED | {name: [[0, 1, 1], [0, 0, 0]]}
        plain = replace(WHOLE, has_bare_images=False)
        assert lay_out(model_of(attention, kind=kind, **config), plain, layout) == PADDED
    other = model_of(attention, kind="gemma4", use_bidirectional_attention="all")
    assert lay_out(other, WHOLE, layout) == PADDED


@pytest.mark.parametrize(("layout", "ends"), [("padded", [0, 2, 2, 3, 4, 5]), ("packed", [0, 2, 2, 3, 4])])
def test_image_tokens_that_see_each_other_have_ends_for_our_attention(layout, ends):
    given = lay_out(model_of("by_sequence", kind="gemma3"), WHOLE, layout)["image_ends"]
    assert isinstance(given, ImageEnds) and given.ends.tolist() == ends and not given.in_windows_only
    assert "image_ends" not in lay_out(model_of("by_sequence", kind="gemma3", image=7), WHOLE, layout)


def test_routes_have_the_places_of_their_tokens():
    routes = torch.arange(10, dtype=torch.int16).view(5, 1, 2)
    batch = replace(WHOLE, routes=routes)
    padded = lay_out_part(model_of("sdpa"), batch, "padded", None).routes
    assert padded is not None and padded[:, 0].tolist() == [
        *[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [PADDING, PADDING]]
    ]
    packed = lay_out_part(model_of("by_sequence"), batch, "packed", None).routes
    assert packed is not None and torch.equal(packed, routes)
    own = lay_out_part(model_of("by_sequence"), batch, "packed", SequenceGroup(place=1, size=2, group=None))
    assert own.routes is not None and own.routes[:, 0].tolist() == [[6, 7], [8, 9], [PADDING, PADDING]]


def test_a_rank_has_a_slice_of_the_row():
    for place, ids, positions, columns, labels, mine in (
        (0, [3, 9, 9], [0, 1, 2], [0, 1], [9, 9], [True, True, False]),
        (1, [4, 5, 1], [0, 1, 0], [0], [5], [False, False, True]),
    ):
        group = SequenceGroup(place=place, size=2, group=None)
        found = lay_out(model_of("by_sequence", image=0), WHOLE, "packed", group)
        segments = found.pop("segments")
        assert found == {
            "input_ids": [ids],
            "position_ids": [positions],
            "at": [[0] * len(columns), columns],
            "labels": labels,
            "mine": mine,
        }
        assert (segments.lengths, segments.parents) == ([3, 2, 1], [-1] * 3) and segments.sequence_group is group


@pytest.mark.parametrize(
    ("attention", "config", "batch", "layout", "told"),
    [
        ("sdpa", {}, SHARED, "padded", "rows that share prefixes cannot be padded: set trainer.share_prefixes=off"),
        *(
            (
                attention, {}, SHARED, "packed",
                f"a llama model with {attention} attention cannot share prefixes: set trainer.share_prefixes=off",
            )
            for attention in ("sdpa", "flash_attention_2")
        ),
        *(
            (
                attention, {"kind": "gemma3"}, WHOLE, "packed",
                f"packed rows under {attention} attention are causal, and the tokens of an image attend in both "
                "directions in this model: set trainer.layout=padded",
            )
            for attention in ("sdpa", "flash_attention_2")
        ),
        (
            "sdpa", {"sliding_window": 2}, WHOLE, "packed",
            "packed rows under sdpa attention take one mask for all layers, and this model's sliding window of 2 is "
            "shorter than a sequence of 3 tokens: set trainer.layout=padded",
        ),
        (
            "sdpa", {}, replace(WHOLE, images=(1,)), "padded",
            "a batch with images has no media: modeling/images/media.py makes them",
        ),
    ],
)  # fmt: skip
def test_what_a_layout_cannot_hold_is_refused(attention, config, batch, layout, told):
    with pytest.raises(ValueError) as refused:
        lay_out(model_of(attention, **config), batch, layout)
    assert str(refused.value) == told


def test_what_fits_is_laid_out():
    for config in ({"sliding_window": 3}, {"sliding_window": 2, "use_sliding_window": False}, {"sliding_window": None}):
        assert lay_out(model_of("sdpa", **config), WHOLE, "packed") == PACKED | {"attention_mask": [[SEEN]]}
    seeing = replace(WHOLE, images=(1,), media={"pixel_values": torch.ones(1)}, has_bare_images=False)
    assert lay_out(model_of("sdpa"), seeing, "padded") == PADDED | {"pixel_values": [1.0]}
    group = SequenceGroup(place=0, size=2, group=None)
    for model, batch, found in (
        (model_of("by_sequence"), replace(WHOLE, rope_ids=ROPE), "['input_ids', 'position_ids', 'segments']"),
        (model_of("sdpa"), WHOLE, "['attention_mask', 'input_ids', 'position_ids']"),
    ):
        with pytest.raises(ValueError) as refused:
            lay_out(model, batch, "packed", group)
        assert str(refused.value) == f"ranks share packed rows of text with their segments, found {found}"
