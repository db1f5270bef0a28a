"""What a layout probe scores, and how its finding and its refusals read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from modeling.attention import attend_by_sequence, refuse_sequence_parallel
from modeling.layout_probe import LayoutProbe
from modeling.probe_rows import draw_segments, list_sequences, make_batch, make_shared_batch

FIRST = [20, 63, 17, 16, 29, 25, 19, 59, 59, 19, 17]


def model_of(*, image: int | None = None, kind: str = "llama", **text: Any) -> Any:
    """Model of which only the config is read."""
    given = {"vocab_size": 64, "sliding_window": None, "max_position_embeddings": 512, **text}
    special = {"eos_token_id": 2, "pad_token_id": None, "image_token_id": image, "video_token_index": 5, "size": 9}
    config = SimpleNamespace(
        model_type=kind,
        image_token_id=image,
        get_text_config=lambda: SimpleNamespace(**given),
        to_dict=lambda: given | special,
    )
    return SimpleNamespace(config=config)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ({}, [11, 13, 9, 16, 21]),
        ({"sliding_window": 16}, [11, 13, 9, 16, 21]),
        ({"sliding_window": 17}, [11, 13, 9, 16, 22]),
        ({"sliding_window": 40}, [11, 13, 9, 16, 45]),
        ({"sliding_window": 256}, [11, 13, 9, 16, 261]),
        ({"sliding_window": 257}, [11, 13, 9, 16, 21]),
        ({"sliding_window": 20, "attention_chunk_size": 30}, [11, 13, 9, 16, 35]),
        ({"sliding_window": [30]}, [11, 13, 9, 16, 21]),
        ({"sliding_window": 40, "max_position_embeddings": 30}, [11, 13, 9, 16, 30]),
        ({"max_position_embeddings": 12}, [11, 12, 9, 12, 12]),
        ({"max_position_embeddings": 1}, [1, 1, 1, 1, 1]),
        ({"max_position_embeddings": None, "sliding_window": 100}, [11, 13, 9, 16, 105]),
    ],
)
def test_the_last_sequence_is_longer_than_a_short_window(text, lengths):
    assert [len(s) for s in draw_segments(model_of(**text))] == lengths


def test_the_tokens_are_always_the_same_and_none_has_a_meaning():
    def draw(**more: Any) -> list[list[int]]:
        return [s.tolist() for s in draw_segments(model_of(**more))]

    assert draw() == draw() and draw()[0] == FIRST
    ids = {token for drawn in draw() for token in drawn}
    assert not ids & {2, 5} and {9, 0, 1, 63} <= {token for drawn in draw(sliding_window=250) for token in drawn}
    assert max(max(drawn) for drawn in draw(vocab_size=10**6, sliding_window=250)) < 4096
    assert {token for drawn in draw(vocab_size=4, image=0) for token in drawn} == {1, 3}
    assert {token for drawn in draw(vocab_size=1, image=0) for token in drawn} == {0}


def test_images_are_in_the_sequences_of_a_model_that_reads_them():
    seeing = model_of(image=60, kind="gemma3")
    places = [(s == 60).nonzero().flatten().tolist() for s in draw_segments(seeing)]
    assert places == [[*range(2, 7)], [*range(2, 7)], [], [], [*range(2, 7)]]
    for model, has_images in ((seeing, False), (model_of(image=60), True), (model_of(image=64, kind="gemma3"), True)):
        assert not any(
            (s >= 60).all() or (s == model.config.image_token_id).any()
            for s in draw_segments(model, has_images=has_images)
        )


def test_batches_hold_the_same_sequences_whole_and_shared():
    segments = [torch.tensor(ids) for ids in ([10, 11], [20, 21, 22], [30], [40, 41], [50, 51, 52])]
    sequences = list_sequences(segments)
    assert [s.tolist() for s in sequences] == [[10, 11], [20, 21, 22, 30], [20, 21, 22, 40, 41], [50, 51, 52]]
    whole, shared = make_batch(sequences), make_shared_batch(segments)
    labels = [11, 21, 22, 30, 21, 22, 40, 41, 51, 52]
    assert whole.labels.tolist() == shared.labels.tolist() == labels
    assert whole.at.tolist() == [0, 2, 3, 4, 6, 7, 8, 9, 11, 12]
    assert shared.at.tolist() == [0, 2, 3, 4, 2, 3, 4, 6, 8, 9]
    assert whole.input_ids.tolist() == [10, 11, 20, 21, 22, 30, 20, 21, 22, 40, 41, 50, 51, 52]
    assert shared.input_ids.tolist() == [10, 11, 20, 21, 22, 30, 40, 41, 50, 51, 52]
    assert whole.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]
    assert shared.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 3, 4, 0, 1, 2]
    assert whole.segment_ids.tolist() == [0] * 2 + [1] * 4 + [2] * 5 + [3] * 3
    assert shared.segment_ids.tolist() == [0] * 2 + [1] * 3 + [2] + [3] * 2 + [4] * 3
    assert (whole.parents.tolist(), whole.lengths.tolist()) == ([-1] * 4, [2, 4, 5, 3])
    assert (shared.parents.tolist(), shared.lengths.tolist()) == ([-1, -1, 1, 1, -1], [2, 3, 1, 2, 3])
    assert whole.tokens.weight.tolist() == [0.0] * 10 and whole.has_bare_images and shared.has_bare_images


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, ""),
        ({"by_path": "2 x Mixer"}, "; by path: 2 x Mixer"),
        ({"by_path": "1 x A", "refuted": ("one", "two")}, "; by path: 1 x A; one; two"),
    ],
)
def test_a_probe_tells_layout_numbers_and_refuted_layouts_in_a_line(more, told):
    names = {"shared": "packed rows with shared prefixes", "packed": "packed rows", "padded": "padded rows"}
    for level, name in names.items():
        probe = LayoutProbe(level=level, attention="sdpa", error=1.26e-6, bound=1e-5, seconds=0.26, **more)
        assert probe.describe() == (
            f"{name} (sdpa attention): log-probabilities as of each sequence alone to 1e-06 (bound 1e-05, 0.3 s){told}"
        )


HEADS = (
    "the model has {} heads of queries and {} of keys and values, and its ranks share them: take a number that divides "
    "both, or divides the first and is a multiple of the second"
)
ROPE = "the model's rotary embedding ({}) depends on the longest sequence of the whole row"


@pytest.mark.parametrize(
    ("config", "size", "told"),
    [
        ({}, 4, None),
        ({}, 8, None),
        ({}, 3, HEADS.format(8, 4)),
        ({}, 16, HEADS.format(8, 4)),
        ({"num_key_value_heads": 3}, 2, HEADS.format(8, 3)),
        ({"num_key_value_heads": None}, 8, None),
        ({"num_key_value_heads": None}, 5, HEADS.format(8, 8)),
        ({"num_key_value_heads": 1}, 8, None),
        ({"rope_parameters": {"rope_type": "dynamic"}}, 2, ROPE.format("dynamic")),
        ({"rope_parameters": {"rope_type": "yarn"}}, 2, None),
        ({"rope_parameters": {"a": {"rope_type": "default"}, "b": {"rope_type": "longrope"}, "c": 1}}, 2,
         ROPE.format("longrope")),
        ({"vision_config": {}}, 2, "a some model reads images, and ranks share rows of text models only"),
        ({"vision_config": None}, 2, None),
    ],
)  # fmt: skip
def test_why_ranks_cannot_share_a_row_is_told(config, size, told):
    given = {"model_type": "some", "num_attention_heads": 8, "num_key_value_heads": 4, **config}
    assert refuse_sequence_parallel(SimpleNamespace(**given), size) == told


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "is for training: it takes neither a mask nor a cache"),
        ({"key": torch.zeros(1, 1, 4, 8)}, "is for training: it takes neither a mask nor a cache"),
        ({"is_causal": False}, "is causal, and Identity is not"),
        ({"b": 1, "a": 0, "seq_idx": 1}, "does not compute a, b, which Identity asks for"),
        ({"dropout": 0.1}, "does not compute dropout, which Identity asks for"),
    ],
)
def test_attention_by_sequence_refuses_what_it_does_not_compute(given, told):
    x = torch.zeros(1, 1, 3, 8)
    with pytest.raises(ValueError) as refused:
        attend_by_sequence(nn.Identity(), x, **{"key": x, "value": x, "attention_mask": None} | given)
    assert str(refused.value) == f"attention by_sequence {told}"
    tower = nn.Identity()
    tower.is_causal = False
    with pytest.raises(ValueError, match=r"^attention by_sequence is causal, and Identity is not$"):
        attend_by_sequence(tower, x, x, x, None)
    empty = torch.ones(0, 0, 0, 0, dtype=torch.bool)
    assert attend_by_sequence(tower, x, x, x, empty, is_causal=True)[0].shape == (1, 3, 1, 8)
