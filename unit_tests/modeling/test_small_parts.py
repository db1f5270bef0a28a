"""Small parts of models by tables: positions of images, cached images, blocks, experts, scores, counts, patterns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from configs.trainer_schema import LoraConfig, ModelConfig
from core.errors import UserError
from core.types.images import PlacedImage
from modeling.attention_scores import Scores, attend
from modeling.blocks import find_blocks
from modeling.experts import is_router, list_blocks, list_expert_weights
from modeling.export import export_parameter, gather_tensors, saved_scopes
from modeling.file_names import plan_files
from modeling.freeze import check_scales
from modeling.head import choose_chunk, split_rows
from modeling.images.cache import CachedImage, ImageCache
from modeling.images.media import add_blank, make_blank
from modeling.images.rope_positions import find_rope_ids
from modeling.probe_rows import make_batch
from modeling.route_counts import PassCounts, RouteCounts, compute_entropy
from modeling.sequence_parallel import RowSlice

IMAGE: Any = SimpleNamespace(hash="h")


def place(begin: int, end: int, grid: tuple[int, int] | None) -> PlacedImage:
    return PlacedImage(image=make_blank(), begin=begin, end=end, grid=grid)


def test_images_have_rows_and_columns_and_text_goes_on_behind_the_larger():
    found = find_rope_ids(13, [place(2, 8, (2, 3)), place(9, 11, (1, 2))])
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8, 9],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 8, 9],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9],
    ]
    assert find_rope_ids(3, []).tolist() == [[0, 1, 2]] * 3 and found.dtype == np.int64
    tall = find_rope_ids(4, [place(0, 3, (3, 1))])
    assert tall.tolist() == [[0, 0, 0, 3], [0, 1, 2, 3], [0, 0, 0, 3]]
    for grid, n in (((2, 2), 3), (None, 3)):
        with pytest.raises(ValueError) as refused:
            find_rope_ids(5, [place(1, 1 + n, grid)])
        assert str(refused.value) == f"an image has the grid {grid} and {n} tokens"


def test_a_blank_image_is_a_sequence_at_the_end_without_trained_tokens():
    batch = make_batch([torch.tensor([3, 4, 5]), torch.tensor([6, 7])])
    for grid, rope in (
        (None, None),
        ((1, 2), [[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 0, 1, 0, 1]]),
    ):
        processor: Any = SimpleNamespace(expand=lambda image, grid=grid: SimpleNamespace(ids=(9, 9), grid=grid))
        found = add_blank(batch, processor)
        assert found.input_ids.tolist() == [3, 4, 5, 6, 7, 9, 9]
        assert found.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1]
        assert found.segment_ids.tolist() == [0, 0, 0, 1, 1, 2, 2]
        assert (found.parents.tolist(), found.lengths.tolist()) == ([-1, -1, -1], [3, 2, 2])
        assert found.labels is batch.labels and found.at is batch.at and found.images == (make_blank(),)
        assert (None if found.rope_ids is None else found.rope_ids.tolist()) == rope
    blank = make_blank()
    assert (blank.width, blank.height) == (32, 32) and np.asarray(blank.open()).tolist() == [[[96] * 3] * 32] * 32


def test_the_least_recently_used_image_goes_first_and_the_newest_stays():
    made = [CachedImage({"x": torch.zeros(n), "y": torch.zeros(n, dtype=torch.int64)}, (1, n)) for n in (1, 2, 3, 90)]
    assert [one.bytes for one in made] == [12, 24, 36, 1080]
    cache = ImageCache(60)
    keys = [("s", "a"), ("s", "b"), ("t", "a"), ("s", "d")]

    def held() -> list[int]:
        return [n for n, key in enumerate(keys) if cache.find(*key) is not None]

    cache.add(*keys[0], made[0])
    cache.add(*keys[1], made[1])
    cache.add(*keys[1], made[3])  # another thread was faster
    assert held() == [0, 1] and cache.find(*keys[1]) is made[1]
    cache.find(*keys[0])
    cache.add(*keys[2], made[2])  # 72 bytes: the second was used longest ago
    assert held() == [0, 2]
    cache.add(*keys[1], made[0])  # 12 + 36 + 12 bytes are as many as there may be
    assert held() == [0, 1, 2]
    cache.add(*keys[3], made[3])
    assert held() == [3]
    cache.add(*keys[0], made[0])
    assert held() == [0]


class Cell(nn.Module):
    _no_split_modules = ("Cell",)


def test_blocks_are_members_of_the_outermost_lists():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Sequential(nn.ModuleList([Cell()])), nn.Sequential(Cell())])
    model.others = nn.ModuleList([nn.Linear(1, 1)])
    model.tower = nn.ModuleList([Cell()])
    found = find_blocks(model, use="u", fix="f")
    assert [id(block) for block in found] == [id(block) for block in (*model.layers, *model.tower)]
    with pytest.raises(UserError) as refused:
        find_blocks(nn.ModuleList([nn.Linear(1, 1)]), use="offload moves", fix="leave it out")
    assert str(refused.value) == (
        "offload moves a model block by block, and ModuleList does not say what its blocks are (_no_split_modules): "
        "leave it out"
    )


def make_mixture() -> nn.Module:
    """Two layers: experts in one tensor below an adapter, and experts that are modules; and a router of nothing."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module(), nn.Module(), nn.Module()])
    held = nn.Module()
    held.weight, held.bias, held.num_experts = nn.Parameter(torch.zeros(4, 2, 3)), nn.Parameter(torch.zeros(4)), 4
    adapter = nn.Module()
    adapter.base_layer = held
    model.layers[0].mlp = nn.Module()
    model.layers[0].mlp.experts, model.layers[0].mlp.gate = adapter, nn.Linear(1, 1)
    model.layers[2].mlp = nn.Module()
    model.layers[2].mlp.experts = nn.ModuleList([nn.Linear(2, 3) for _ in range(5)])
    model.layers[2].mlp.router, model.layers[2].mlp.gate_proj = nn.Linear(1, 1), nn.Linear(1, 1)
    model.layers[1].gate, model.layers[1].experts = nn.Linear(1, 1), 3
    return model


def test_experts_are_found_by_their_names():
    model = make_mixture()
    found = [(block.name, block.layer, block.experts) for block in list_blocks(model)]
    assert found == [("layers.0.mlp", 0, 4), ("layers.2.mlp", 2, 5)]
    assert [*list_expert_weights(model)] == ["layers.0.mlp.experts.base_layer.weight"]
    names = ["layers.0.mlp.gate", "layers.2.mlp.router", "layers.2.mlp.gate_proj", "layers.1.gate"]
    assert [is_router(model, name) for name in names] == [True, True, False, False]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.sampled_from([None, 0.5]), st.sampled_from(["plain", "cap", "sinks"]), st.booleans())
def test_scores_are_changed_before_the_softmax(n, scaling, kind, shares):
    """A cap bounds a score, and a sink takes part with a value of zero."""
    draw = torch.Generator().manual_seed(n)
    shape = (2, 1 if shares else 4, n, 3)
    q, k, v = (torch.randn(*s, generator=draw, dtype=torch.float64) for s in ((2, 4, n, 3), shape, shape))
    sinks = torch.randn(4, generator=draw, dtype=torch.float64)
    scores = Scores(
        scaling=scaling, window=None, cap=0.7 if kind == "cap" else None, sinks=sinks if kind == "sinks" else None
    )
    assert scores.leading == {"plain": None, "cap": 0, "sinks": 1}[kind]
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    mask = None if scores.leading is None else torch.cat([torch.ones(n, scores.leading, dtype=torch.bool), seen], 1)
    got = attend(q, k, v, mask, scores)
    found = q @ k.mT.expand(2, 4, 3, n) * (3**-0.5 if scaling is None else scaling)
    found = 0.7 * (found / 0.7).tanh() if kind == "cap" else found
    found = found.masked_fill(~seen, -torch.inf)
    if kind == "sinks":
        found = torch.cat([found, sinks.view(1, 4, 1, 1).expand(2, 4, n, 1)], -1)
    torch.testing.assert_close(got, found.softmax(-1)[..., :n] @ v)
    both = Scores(scaling=None, window=None, cap=1.0, sinks=sinks)
    with pytest.raises(ValueError) as refused:
        attend(q, k, v, mask, both)
    assert str(refused.value) == "attention does not compute softcap and s_aux together"


@pytest.mark.parametrize(
    ("n", "mib", "measured", "chunk"),
    [
        (10**6, 0, False, None),
        # three copies of 2 bytes for each of 1024 logits: 170 tokens fit into a MiB, and 171 do not
        (170, 1, False, None),
        (171, 1, False, 51),
        (171, 1, True, 12),
        (341, 2, True, None),
        (342, 2, True, 25),
    ],
)
def test_chunks_hold_what_fits_into_the_budget(n, mib, measured, chunk):
    text = SimpleNamespace(vocab_size=1024)
    model: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text), dtype=torch.bfloat16)
    assert choose_chunk(model, n, mib, measured=measured) == chunk
    text.vocab_size = 2**30
    assert choose_chunk(model, 1, 1, measured=measured) == 1


def test_rows_are_split_into_chunks_and_slices():
    assert split_rows(5, 2) == [slice(0, 2), slice(2, 4), slice(4, 5)] and split_rows(4, 2)[-1] == slice(2, 4)
    assert split_rows(0, 3) == [slice(0, 0)]
    slices = [RowSlice(place=place, size=3, total=7) for place in range(3)]
    assert [(own.width, own.begin, own.padding) for own in slices] == [(3, 0, 2), (3, 3, 2), (3, 6, 2)]
    row = torch.arange(14).view(2, 7)
    assert [own.take(row, fill=-1).tolist() for own in slices] == [
        [[0, 1, 2], [7, 8, 9]],
        [[3, 4, 5], [10, 11, 12]],
        [[6, -1, -1], [13, -1, -1]],
    ]
    assert [own.find_own(torch.arange(7)).tolist() for own in slices] == [
        [i // 3 == place for i in range(7)] for place in range(3)
    ]


def choice_of(own: list[list[int]], chosen: list[list[int]], scores: Tensor, *, normalised: bool = False) -> Any:
    return SimpleNamespace(
        own=torch.tensor(own), chosen=torch.tensor(chosen), scores=scores, experts=scores.shape[-1],
        normalised=scores[None] if normalised else None,
    )  # fmt: skip


def test_choices_are_counted_by_token_and_layer():
    """Four tokens and padding: one without a route, one changed in a layer, one in both, one in another order."""
    unknown, padding = [-1, -1], [-2, -2]
    given = torch.tensor(
        [[[0, 1], [1, 2]], [[0, 1], unknown], [[2, 0], [1, 2]], [[1, 0], [0, 1]], [padding, padding]]
    ).to(torch.int16)
    hook: Any = SimpleNamespace(blocks=[0, 1], experts=4)
    counts = RouteCounts(hook, "cpu")
    assert counts.read(counts.flatten()) == {}
    seen = PassCounts(counts, given)
    flat, sure = torch.zeros(5, 4), torch.tensor([[0.0, 0.0, 0.0, 1.0]] * 5)
    same = [[0, 1]] * 5
    seen.see(0, choice_of([[0, 1], [3, 1], [0, 1], [0, 1], [3, 3]], same, flat))
    seen.see(1, choice_of([[1, 2], [0, 1], [0, 2], [0, 1], [3, 3]], [[2, 0]] * 5, sure, normalised=True))
    seen.finish()
    assert counts.sums.tolist() == [4, 1, 7, 3, 3, 1]
    assert counts.load.tolist() == [[4, 4, 0, 0], [4, 0, 4, 0]] and counts.entropy.tolist() == pytest.approx([4, 8])
    assert counts.read(counts.flatten() * 2) == pytest.approx(
        {
            "moe/load_max": 2.0,
            "moe/unused_experts": 0.5,
            "moe/router_entropy": 0.5,
            "moe/missing_routes": 0.25,
            "moe/changed_choices": 3 / 7,
            "moe/changed_tokens": 1 / 3,
        }
    )
    half = torch.tensor([[0.2, 0.2, 0.0, 0.0]])
    assert compute_entropy(choice_of([[0]], [[0]], half, normalised=True)).tolist() == pytest.approx([0.5])
    assert compute_entropy(choice_of([[0]], [[0]], half * 0)).tolist() == pytest.approx([1.0])


def test_scales_of_learning_rates_match_trained_parameters_once():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    check = {"images": "auto", "path": "p"}
    check_scales(model, {"a.weight": 2.0, "b": 0.5}, [], **check)
    check_scales(model, {"a": 2.0}, ["a.bias", "b.weight"], **check)
    for scales, frozen, told in (
        ({"a": 1.0}, ["a.weight", "a.bias"], "'a' names frozen parameters only: leave it out"),
        ({"a": 1.0, "*.bias": 1.0}, [], "'a' and '*.bias' both match a.bias: make one of them narrower"),
        (
            {"c": 1.0}, [],
            "'c' matches no parameter of model.path=p: name a parameter or a module, with * for any characters, such "
            "as b.bias, b.weight, a.bias",
        ),
    ):  # fmt: skip
        with pytest.raises(UserError) as refused:
            check_scales(model, scales, frozen, **check)
        assert str(refused.value) == f"trainer.lr_scales: {told}"


def test_what_a_run_saves_and_gathers():
    lora, merged = LoraConfig(r=2), LoraConfig(r=2, merge_on_save=True)
    assert saved_scopes(ModelConfig(path="p")) == ["whole"]
    assert saved_scopes(ModelConfig(path="p", lora=lora)) == ["adapter"]
    assert saved_scopes(ModelConfig(path="p", lora=merged)) == ["whole", "adapter"]
    assert saved_scopes(ModelConfig(path="p", lora=merged, quantization="nf4")) == ["whole"]
    own = {"whole": torch.ones(2), "adapter": torch.zeros(3)}
    asked: list[tuple[int, str]] = []

    def export(size: int, scope: Any) -> list[list[tuple[str, Tensor]]]:
        asked.append((size, scope))
        return [[("a", own[scope])], [("b", own[scope])]]

    found = gather_tensors(export, ["whole", "adapter"])
    assert {scope: {name: t.tolist() for name, t in kept.items()} for scope, kept in found.items()} == {
        "whole": {"a": [1.0, 1.0], "b": [1.0, 1.0]},
        "adapter": {"a": [0.0] * 3, "b": [0.0] * 3},
    }
    assert asked == [(2**28, "whole"), (2**28, "adapter")]
    own["whole"].zero_()
    assert found["whole"]["a"].tolist() == [1.0, 1.0], "a copy"
    assert gather_tensors(export, ["whole"], keeps=False) == {"whole": {}} and len(asked) == 3


def test_a_plan_of_files_needs_no_memory():
    seen: set[str] = set()

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.update(t.device.type for t in tensors.values())
        return {f"x.{name}": t for name, t in tensors.items()}

    groups = plan_files([export_parameter(name, torch.ones(2)) for name in "ab"], convert)
    assert seen == {"meta"} and [[t.name for t in group.tensors] for group in groups] == [["a"], ["b"]]
    assert [name for group in groups for name, _ in group.compute(lambda t: t.compute())] == ["x.a", "x.b"]
