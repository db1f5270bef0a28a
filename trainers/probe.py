"""Probe prompt that verifies a weight sync, on the trainer's side."""

from __future__ import annotations

from collections.abc import Sequence

from core.types.images import PlacedImage, list_written
from core.types.samples import Prompt, Sample, make_sample


def make_probe_sample(token_ids: list[int], images: Sequence[PlacedImage]) -> Sample:
    """Return a sample whose forward pass scores every token of text after the first."""
    n = len(token_ids)
    written = set(list_written(n, images))
    return make_sample(
        prompt=Prompt(id="probe", messages=[]),
        token_ids=token_ids,
        action_mask=[i in written for i in range(n)],
        rollout_logp=[0.0] * n,
        versions=[-1] * n,
        images=tuple(images),
    )
