"""Sequences of a layout probe, and the batches that hold them: shared, packed, padded or alone.

    row     [D | P | a | b | C]      sequences D, P + a, P + b and C
    shared  P is computed once       packed and padded: four sequences of their own

Tokens are drawn by a fixed seed, so every rank and every run has the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.types.samples import Batch, Tokens
from modeling.image_blocks import find_image_blocks

ALONE, PREFIX, REPLIES, LAST = 11, 13, (9, 16), 21
"""Tokens of D, P, a and b, and C."""
LONGEST_WINDOW = 256
"""Largest sliding window, in tokens, that the probe exceeds."""


def draw_segments(model: nn.Module, *, has_images: bool = True) -> list[Tensor]:
    """Return the tokens of D, P, a, b and C. The last is longer than a short window of the model.

    has_images: with image tokens if those attend in both directions.
    """
    hf: Any = model
    config = hf.config.get_text_config()
    # a placeholder of an image would ask for features
    marks = ("token_id", "token_index")
    special = {v for name, v in hf.config.to_dict().items() if name.endswith(marks) and isinstance(v, int)}
    known = torch.tensor([i for i in range(min(config.vocab_size, 4096)) if i not in special] or [0])
    windows = [getattr(config, name, None) or 0 for name in ("sliding_window", "attention_chunk_size")]
    beyond = max((w + 5 for w in windows if isinstance(w, int) and w <= LONGEST_WINDOW), default=0)
    most = getattr(config, "max_position_embeddings", None) or beyond + LAST
    random = torch.Generator().manual_seed(0)
    lengths = [ALONE, PREFIX, *REPLIES, max(LAST, beyond)]
    segments = [known[torch.randint(len(known), (min(n, most),), generator=random)] for n in lengths]
    if has_images and (blocks := find_image_blocks(hf.config)) is not None and blocks.token < config.vocab_size:
        # An image in D, P and C, without pixels: what counts here is which tokens attend to which.
        for segment in (segments[0], segments[1], segments[-1]):
            segment[2:7] = blocks.token
    return segments


def list_sequences(segments: Sequence[Tensor]) -> list[Tensor]:
    """Return the four sequences."""
    alone, prefix, first, second, last = segments
    return [alone, torch.cat([prefix, first]), torch.cat([prefix, second]), last]


def make_batch(sequences: Sequence[Tensor]) -> Batch:
    """Return a batch of whole sequences, in which every token after the first is scored."""
    return _make_batch(sequences, [-1] * len(sequences), [[i] for i in range(len(sequences))])


def make_shared_batch(segments: Sequence[Tensor]) -> Batch:
    """Return the same tokens in the same order as `make_batch(list_sequences(segments))`, with the prefix once."""
    return _make_batch(segments, [-1, -1, 1, 1, -1], [[0], [1, 2], [1, 3], [4]])


def _make_batch(segments: Sequence[Tensor], parents: list[int], paths: list[list[int]]) -> Batch:
    """paths: segments of each sequence, from the root."""
    lengths = [len(s) for s in segments]
    places = torch.arange(sum(lengths)).split(lengths)
    before = [0 if p < 0 else lengths[p] for p in parents]
    rows = [(torch.cat([places[i] for i in path]), torch.cat([segments[i] for i in path])) for path in paths]
    at = torch.cat([place[:-1] for place, _ in rows])
    return Batch(
        input_ids=torch.cat([*segments]),
        position_ids=torch.cat([torch.arange(a, a + n) for a, n in zip(before, lengths, strict=True)]),
        segment_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        parents=torch.tensor(parents),
        lengths=torch.tensor(lengths),
        at=at,
        labels=torch.cat([ids[1:] for _, ids in rows]),
        tokens=Tokens(weight=torch.zeros(len(at))),
        has_bare_images=True,
    )
