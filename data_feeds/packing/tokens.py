"""Tokens of a micro-batch: the columns of its samples at the tokens that are trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.types.arrays import Floats, list_fields
from core.types.samples import TOKEN_REWARDS, Sample, Tokens
from core.types.terms import Has
from data_feeds.packing.inputs import Inputs


def select_tokens(
    samples: list[Sample],
    weights: Sequence[float],
    inputs: Inputs,
    numbering: Callable[..., dict[str, list[int]]],
    *,
    has: Has,
    dtype: torch.dtype,
) -> Tokens:
    """Return the tokens that these inputs predict, with the columns that exist there."""

    def floats(per_sample: list[Floats]) -> Tensor:
        # only trained tokens are copied: a NaN at another token cannot reach a loss
        return torch.from_numpy(inputs.select(per_sample)).to(dtype)

    columns: dict[str, Any] = {}
    if has != "none":
        scored = {
            name: floats([s.columns[name] for s in samples]) for name in samples[0].columns if name != TOKEN_REWARDS
        }
        columns |= {name: scored.pop(name) for name in list_fields(Tokens) if name in scored}
        columns["columns"] = scored  # those whose names an algorithm chose
        if all_credited(samples):
            columns["advantage"] = floats([s.advantage for s in samples if s.advantage is not None])
    if has == "all":
        columns["rollout_logp"] = floats([s.rollout_logp for s in samples])
    numbers = numbering(counts=inputs.counts)
    columns |= {
        name: torch.from_numpy(np.repeat(np.array(own, dtype=np.int32), inputs.counts)) for name, own in numbers.items()
    }
    weight = torch.from_numpy(np.repeat(np.array(weights, dtype=np.float64), inputs.counts))
    return Tokens(weight=weight.to(dtype), **columns)


def all_credited(samples: list[Sample]) -> bool:
    """Return True if all samples have an advantage, False if none has. Raises ValueError for a mix."""
    credited = {s.advantage is not None for s in samples}
    if len(credited) == 2:
        raise ValueError(
            "some samples of an update have an advantage and some have none: compute_advantages() must set all or none"
        )
    return credited.pop()


def drop_all(tokens: Tokens) -> Tokens:
    """Return no tokens, with the same columns."""
    columns: dict[str, Any] = {name: getattr(tokens, name, None) for name in list_fields(Tokens)}
    empty: dict[str, Any] = {name: v[:0] for name, v in columns.items() if isinstance(v, Tensor)}
    empty["columns"] = {name: v[:0] for name, v in tokens.columns.items()}
    return tokens.replace(**empty)
