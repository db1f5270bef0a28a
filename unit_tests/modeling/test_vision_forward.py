"""Models that see compute what transformers computes, however samples lie in rows; their towers are not causal."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from core.errors import RunStopped, UserError
from core.types.samples import Batch, Group
from data_feeds.packing.batches import pack
from modeling.attention import BY_SEQUENCE, attend_by_sequence_if_able
from modeling.forward import compute_values, forward
from modeling.images.media import ImageMedia, add_blank
from modeling.images.processor import ImageProcessor
from modeling.images.rope_positions import find_rope_ids
from modeling.layout_probe import can_share_prefixes, layout_for
from modeling.load import check_weights, load_model, load_scalar_model
from modeling.media import MediaLoader
from unit_tests.helpers.examples import families
from unit_tests.helpers.seeing import (
    MARKED,
    SOFT,
    WITH_GRIDS,
    draw_image,
    join_parts,
    make_model,
    plain_inputs,
    plain_logp,
    save_model,
    seeing_groups,
    some_text,
)
from unit_tests.helpers.shared_prefixes import check_alike, gradient, laid_out

pytestmark = [pytest.mark.one_core, pytest.mark.usefixtures("one_thread")]


@dataclass(frozen=True)
class Seeing:
    family: str
    path: str
    loader: MediaLoader
    images: ImageMedia
    groups: list[Group]

    @property
    def is_recurrent(self) -> bool:
        return self.family == "qwen3_5"

    @property
    def tolerance(self) -> float:
        """In double precision; transformers computes recurrent layers and Gemma's norms in float32 all the same."""
        return 2e-5 if self.is_recurrent or self.family in SOFT else 1e-7

    @property
    def processor(self) -> ImageProcessor:
        return self.images.processor

    def load(self, model: nn.Module, batch: Batch) -> Batch:
        self.images.model = model
        return self.loader.load(batch)

    def in_double(self, attention: str = BY_SEQUENCE) -> nn.Module:
        model = make_model(self.family, "eager" if attention == "eager" else "sdpa")
        if attention == BY_SEQUENCE:
            attend_by_sequence_if_able(model)
            assert can_share_prefixes(model)  # in float32, as in a run
        return model.double()

    def score(self, model: nn.Module, batch: Batch, layout: Any, *, mib: int = 0) -> torch.Tensor:
        ready = self.load(model, batch)
        return forward(model, model, ready, layout=layout, temperature=0.7, logits_mib=mib).logp


@pytest.fixture(scope="module", params=MARKED)
def seeing(request, tmp_path_factory) -> Seeing:
    path = save_model(tmp_path_factory.mktemp(request.param), request.param)
    loader = MediaLoader(make_model(request.param), path, device="cpu")
    assert loader.images is not None
    return Seeing(request.param, path, loader, loader.images, seeing_groups(loader.images.processor))


def test_shared_packed_and_padded_rows_give_what_each_sample_has_alone(seeing):
    model = seeing.in_double()
    [batch] = laid_out(seeing.groups, "shared")
    n_images = sum(len(s.images) for g in seeing.groups for s in g)
    assert len(batch.images) < n_images and len({p.hash for p in batch.images}) > 3
    check_alike(model, seeing.groups, score=seeing.score, tolerance=seeing.tolerance)


def test_a_cut_changes_nothing(seeing):
    """Micro-batches of text alone are among those of one sample each: they get a blank image."""
    max_tokens = max(len(s.token_ids) for g in seeing.groups for s in g)
    assert len(laid_out(seeing.groups, "shared", max_tokens=max_tokens)) > 2
    assert any(not b.images for b in laid_out(seeing.groups, "alone"))
    check_alike(
        seeing.in_double(), seeing.groups, score=seeing.score, max_tokens=max_tokens, tolerance=seeing.tolerance
    )


@pytest.mark.parametrize(
    ("attention", "layout"),
    [("sdpa", "padded"), ("sdpa", "packed"), ("eager", "packed"), (BY_SEQUENCE, "padded"), (BY_SEQUENCE, "packed")],
)
def test_log_probabilities_and_gradients_are_those_of_transformers(seeing, attention, layout):
    """Transformers runs each sample by itself with its own eager attention, and finds positions and features itself."""
    if seeing.is_recurrent and layout == "packed" and attention != BY_SEQUENCE:
        pytest.skip("a mask does not separate sequences in recurrent layers, so the probe chooses padded rows")
    if seeing.family in SOFT and layout == "packed" and attention != BY_SEQUENCE:
        pytest.skip("refused, since a causal mask is not that of images: see test_layout_probe.py")
    plain, model = seeing.in_double("eager"), seeing.in_double(attention)
    samples = [s for g in seeing.groups for s in g]
    want = torch.cat([plain_logp(plain, seeing.processor, s, 0.7) for s in samples])
    got = seeing.score(model, pack(samples, [1.0] * len(samples)), layout)
    assert (got - want).norm() <= 10 * seeing.tolerance * want.norm()
    expected = gradient(plain, want)
    assert (gradient(model, got) - expected).norm() <= 10 * seeing.tolerance * expected.norm()
    assert expected.norm() > 0.1


@torch.no_grad()
def test_images_matter(seeing):
    """What the tests above compare would differ if two images of one size changed places."""
    model = seeing.in_double()
    [batch] = laid_out(seeing.groups, "packed")
    right = seeing.score(model, batch, "packed")
    swapped = list(batch.images)
    first, second, *_ = [i for i, image in enumerate(swapped) if (image.width, image.height) == (24, 40)]
    assert swapped[first] != swapped[second]
    swapped[first], swapped[second] = swapped[second], swapped[first]
    wrong = seeing.score(model, replace(batch, images=tuple(swapped)), "packed")
    assert (wrong - right).abs().max() > 1e-3


def test_the_tower_never_gets_our_causal_attention(seeing):
    model = seeing.in_double()
    parts = {type(m).__name__: m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    kernels = {name: kernel for name, kernel in parts.items() if "Vision" in name}
    assert kernels and {*kernels.values()} == {"sdpa"}
    assert model.config.get_text_config()._attn_implementation == BY_SEQUENCE
    model.set_attn_implementation(BY_SEQUENCE)  # one string, which reaches the tower too
    [batch] = laid_out(seeing.groups, "packed")
    # the tower of Gemma 4 has a mask, which is refused before
    with pytest.raises(ValueError, match=r"by_sequence is (causal, and \w+Attention is not|for training)"):
        seeing.score(model, batch, "packed")


def test_positions_are_those_of_transformers(seeing):
    """On conversations by chance, with up to four images."""
    if seeing.family not in WITH_GRIDS:
        assert all(s.images[0].grid is None for g in seeing.groups for s in g if s.images)
        return
    rng = random.Random(0)
    model: Any = make_model(seeing.family)
    for n in range(12):
        parts: list[Any] = [some_text(rng, rng.randint(1, 4))]
        for i in range(rng.randint(1, 4)):
            size = rng.choice([8, 16, 24, 40]), rng.choice([8, 16, 24, 40])
            parts += [draw_image(10 * n + i, size), some_text(rng, rng.randint(0, 4))]
        sample = join_parts(seeing.processor, [*parts, some_text(rng, 2)])
        inputs = plain_inputs(model, seeing.processor, sample)
        given = {name: inputs[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw")}
        want, _ = model.model.get_rope_index(**given)
        got = find_rope_ids(len(sample.token_ids) - 1, sample.images)
        assert torch.equal(want[:, 0], torch.from_numpy(got)), n


def test_the_head_in_chunks_sees_the_same(seeing, monkeypatch):
    model = seeing.in_double()
    [batch] = laid_out(seeing.groups, "shared")
    whole = seeing.score(model, batch, "packed")
    monkeypatch.setattr("modeling.head.COPIES_AT_ONCE", 2**20)
    monkeypatch.setattr("modeling.head.BYTES_PER_LOGIT", 2**14)
    chunked = seeing.score(model, batch, "packed", mib=4)
    torch.testing.assert_close(chunked, whole)
    want = gradient(model, whole)
    assert (gradient(model, chunked) - want).norm() <= 1e-6 * want.norm()


def test_layers_that_are_computed_again_give_the_same_gradient(seeing):
    model = seeing.in_double().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check_alike(model, seeing.groups[:1], score=seeing.score, tolerance=seeing.tolerance)


def value_of(seeing: Seeing, model: nn.Module, batch: Batch, layout: Any) -> torch.Tensor:
    ready = seeing.load(model, batch)
    return compute_values(model, ready, layout=layout, model=model)[0]


def test_values_are_read_from_the_body_and_saved_reward_models_load_again(seeing, tmp_path):
    model: Any = load_scalar_model(seeing.path, dtype="float32", attention="auto")
    assert not model.score.weight.any() and layout_for("auto", model) == "packed"
    nn.init.normal_(model.score.weight)
    model.save_pretrained(tmp_path)
    check_weights(str(tmp_path))
    again: Any = load_scalar_model(str(tmp_path), dtype="float32", attention="auto")
    assert can_share_prefixes(again)
    for one, other in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1])
    check_alike(model.double(), seeing.groups, score=partial(value_of, seeing), tolerance=seeing.tolerance)
    sample = seeing.groups[0][2]
    plain = make_model(seeing.family, "eager").double()
    hidden = plain.model(**plain_inputs(plain, seeing.processor, sample)).last_hidden_state[0]
    want = [model.score(hidden)[t - 1, 0] for t, yes in enumerate(sample.loss_mask) if yes]
    got = value_of(seeing, model, pack([sample], [1.0]), "packed")
    torch.testing.assert_close(got.double(), torch.stack(want), atol=1e-5, rtol=1e-3 if seeing.is_recurrent else 1e-5)


def test_a_blank_image_beside_text_changes_nothing_but_reaches_all_weights(seeing):
    model = seeing.in_double()
    batch = pack(seeing.groups[1], [1.0, 1.0])
    with_blank = add_blank(batch, seeing.processor)
    assert not batch.images and len(with_blank.images) == 1
    ready = seeing.load(model, with_blank)
    for layout in ("packed", "padded"):
        alone = forward(model, model, batch, layout=layout, temperature=0.7).logp
        beside = forward(model, model, ready, layout=layout, temperature=0.7).logp
        torch.testing.assert_close(beside, alone)
        slopes = torch.autograd.grad(beside.sum(), [*model.parameters()], allow_unused=True)
        unreached = [n for (n, _), g in zip(model.named_parameters(), slopes, strict=True) if g is None]
        assert unreached == []
        tower = [g for (n, _), g in zip(model.named_parameters(), slopes, strict=True) if "vis" in n.split(".")[1]]
        assert tower and not any(g.any() for g in tower)


def test_a_placeholder_without_a_image_stops_the_run(seeing):
    """A sampled one would shift every image that follows."""
    model = seeing.in_double()
    [batch] = laid_out(seeing.groups, "packed")
    shifted = replace(batch, input_ids=batch.input_ids.clone())
    shifted.input_ids[-1] = model.config.image_token_id
    with pytest.raises(RunStopped, match="a sample's tokens do not fit its images"):
        seeing.score(model, shifted, "packed")
    with pytest.raises(ValueError, match="has no media"):
        forward(model, model, batch, layout="packed", temperature=1.0)


def test_a_saved_model_loads_with_its_parts(seeing):
    model = load_model(seeing.path, dtype="float32", attention="auto")
    assert can_share_prefixes(model) and layout_for("auto", model) == "packed"
    check_weights(seeing.path)


def test_a_text_model_takes_no_images(tiny_path):
    model = load_model(tiny_path, dtype="float32", attention="auto")
    loader = MediaLoader(model, tiny_path, device="cpu")
    [batch] = laid_out(families(), "packed")
    assert loader.load(batch).media == {}
    with pytest.raises(UserError, match="is a text model, or used as one here, and a sample has images"):
        loader.load(replace(batch, images=(draw_image(0),)))
