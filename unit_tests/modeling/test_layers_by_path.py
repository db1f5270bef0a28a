"""Layers that mix tokens, in rows of segments: toys whose numbers are worked out by hand."""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modeling.paths import PathLayers, find_mixers, list_layers
from modeling.segments import Segments


class Sums(nn.Module):
    """Each token gets the sum of all tokens of its row so far, as a recurrent layer might compute."""

    def __init__(self, *, is_tuple: bool) -> None:
        super().__init__()
        self.is_tuple, self.seen = is_tuple, list[dict[str, Any]]()

    def forward(self, x: Tensor, *more: Any, **given: Any) -> Any:
        self.seen.append(given | {"more": more})
        out = x.cumsum(1)
        return (out, "state") if self.is_tuple else out


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = nn.Identity(), mixer

    def forward(self, x: Tensor, *more: Any, **given: Any) -> Any:
        return self.mixer(self.norm(x), *more, **given)


SEGMENTS = Segments([2, 1, 2], [-1, 0, 0])
ROW = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0]])
PLACES = torch.tensor([[0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 3, 4]])
"""Of each segment, behind its ancestors; the last token is repeated."""


@pytest.mark.parametrize("is_tuple", [False, True])
def test_a_layer_by_path_reads_every_segment_behind_its_ancestors(is_tuple):
    mixer = Sums(is_tuple=is_tuple)
    layer = Layer(mixer)
    paths = PathLayers([(layer, mixer), (nn.Identity(), Sums(is_tuple=False))])
    assert (paths.names, paths.count, len(paths.hooks)) == (["Sums"], 2, 6)
    x, other = ROW[..., None], torch.ones(1, 4)
    borders = {"seq_idx": 1, "cu_seq_lens_q": 2, "cu_seq_lens_k": 3, "max_length_q": 4, "max_length_k": 5}
    given = {"positions": (ROW, other), "attention_mask": other, "other": other, "flag": True} | borders
    out = layer(x, (ROW, 7), segments=SEGMENTS, **given)
    first = out[0] if is_tuple else out
    # [1 | 1+2], [.. 1+2+4], [.. 1+2+8 | 1+2+8+16]
    assert first[0, :, 0].tolist() == [1.0, 3.0, 7.0, 11.0, 27.0] and first.shape == (1, 5, 1)
    assert not is_tuple or out[1] == "state"
    [seen] = mixer.seen
    assert seen.keys() == {"positions", "attention_mask", "other", "flag", "more"}
    assert seen["attention_mask"] is None and seen["other"] is other and seen["flag"] is True
    assert seen["positions"][0].tolist() == ROW[0][PLACES].tolist() and seen["positions"][1] is other
    assert seen["more"][0][0].tolist() == ROW[0][PLACES].tolist() and seen["more"][0][1] == 7

    # padded rows have no segments
    out = layer(x, segments=None, attention_mask=other)
    assert (out[0] if is_tuple else out)[0, :, 0].tolist() == [1.0, 3.0, 7.0, 15.0, 31.0]
    assert mixer.seen[1] == {"segments": None, "attention_mask": other, "more": ()}
    paths.remove()
    out = layer(x, segments=SEGMENTS)
    assert (out[0] if is_tuple else out)[0, :, 0].tolist() == [1.0, 3.0, 7.0, 15.0, 31.0]
    assert mixer.seen[2] == {"segments": SEGMENTS, "more": ()}


class Model(nn.Module):
    """Layers with a part that mixes tokens, beside a list of another length and one outside of the decoder."""

    def __init__(self, *layers: nn.Module, decoder: bool = True) -> None:
        super().__init__()
        self.tower = nn.ModuleList([nn.Identity() for _ in layers])
        self.text = nn.Module()
        self.text.short, self.text.layers = nn.ModuleList([nn.Identity()]), nn.ModuleList(layers)
        text = SimpleNamespace(num_hidden_layers=len(layers))
        self.config = SimpleNamespace(get_text_config=lambda: text)
        if decoder:
            self.get_decoder = lambda: self.text

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.text.layers:
            x = layer(x)
        return x


def test_decoder_layers_are_those_of_the_decoder():
    layers = [Layer(nn.Identity()) for _ in range(3)]
    model, without = Model(*layers), Model(*layers, decoder=False)
    assert list_layers(model) == layers
    assert list_layers(without) == [*without.tower], "the first list as long as the config says"
    model.config.get_text_config().num_hidden_layers = 4
    assert list_layers(model) == []


class Block(nn.Module):
    """x + mix(norm(x)); the mixer gets its input by name, and an index that is no hidden state."""

    def __init__(self, *, is_tuple: bool) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(2), Sums(is_tuple=is_tuple)
        self.gate = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.mix(x=self.norm(x), index=torch.arange(x.shape[1])[None], pair=(x, 3))
        return x + self.gate(out[0] if self.mix.is_tuple else out)


def test_a_child_that_lets_nan_reach_another_sequence_mixes():
    model = Model(Block(is_tuple=False), Layer(nn.Identity()), Block(is_tuple=True))
    x = torch.randn(1, 5, 2, generator=torch.Generator().manual_seed(0))
    poisoned = torch.tensor([True, True, False, False, False])
    found = find_mixers(model, lambda: model(x), poisoned, ~poisoned)
    blocks = [model.text.layers[0], model.text.layers[2]]
    assert found == [(block, block.mix) for block in blocks]
    for block in blocks:
        [seen] = block.mix.seen
        assert torch.equal(seen["index"], torch.arange(5)[None]) and seen["pair"][1] == 3
        assert seen["pair"][0].isnan().any(-1)[0].tolist() == poisoned.tolist()
    assert find_mixers(model, lambda: model(x), ~poisoned, poisoned) == [], "nothing flows back"
    assert not model(x).isnan().any(), "the hooks are gone"

    def fail() -> None:
        model(x)
        raise KeyError

    with pytest.raises(KeyError):
        find_mixers(model, fail, poisoned, ~poisoned)
    assert not model(x).isnan().any()


def test_a_row_of_segments_is_made_of_lengths_and_parents_alone():
    assert [*signature(Segments).parameters] == ["lengths", "parents", "sequence_group"]
    one, other = Segments([2, 1], [-1, 0]), Segments([3], [-1])
    one.find_mask(one.runs[1], None, torch.device("cpu"))
    index, paths = one.index_keys(torch.device("cpu")), one.index_paths(torch.device("cpu"))
    assert other.index_keys(torch.device("cpu")) is not index and other.index_paths(torch.device("cpu")) is not paths
    assert other.find_mask(other.runs[0], None, torch.device("cpu")) is None, "no row has what another has kept"
