"""Kept sets of the trained tokens of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.types.kept_sets import KeptSets, KeptTokens
from core.types.samples import Sample


def select_kept(samples: Sequence[Sample], chosen: Sequence[slice | NDArray[np.integer[Any]]]) -> KeptTokens | None:
    """Return the sets of the tokens that the chosen inputs of each sample predict; None if no sample has sets.

    Raises ValueError if some samples have sets, and others have sampled tokens without.
    """
    if all(sample.kept is None for sample in samples):
        return None
    parts: list[KeptSets] = []
    for sample, inputs in zip(samples, chosen, strict=True):
        # + 1 is the shift: input t predicts token t + 1
        predicted = np.arange(len(sample.token_ids))[1:][inputs]
        if sample.kept is not None:
            parts.append(sample.kept.take(predicted))
            continue
        if (sample.versions[predicted] >= 0).any():
            raise ValueError(
                f"a sample of {sample.prompt.id!r} has no kept sets, and others of its micro-batch have: a sample of "
                "truncated sampling (rollout.top_p, top_k, min_p) must keep Sample.kept"
            )
        parts.append(KeptSets.none(len(predicted)))
    return KeptTokens.of(KeptSets.join(parts))
