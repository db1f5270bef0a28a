"""Columns computed by a trainer for the tokens of micro-batches, mapped back to samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from core.types.arrays import Floats
from core.types.samples import Sample, ScoredColumn
from data_feeds.packing.batches import Plan

C = TypeVar("C", bound=str)


def add_columns(plan: Plan, scored: list[list[dict[ScoredColumn, Floats]]]) -> dict[int, Sample]:
    """Return a plan's samples with the columns computed by a trainer, by id() of the sample.

    scored: [rank][micro-batch][column], each [M].
    """
    laid = lay_out_columns(plan, scored, fill=0.0)
    return {id(s): s.replace(columns=s.columns | laid[id(s)]) for s in plan.samples if id(s) in laid}


def lay_out_columns(
    plan: Plan, columns: Sequence[Sequence[Mapping[C, Floats]]], *, fill: float
) -> dict[int, dict[C, Floats]]:
    """Expand columns of trained tokens to all tokens of each sample, by id() of the sample.

    columns: [rank][micro-batch][column], each [M]. fill: value of tokens that are not trained on.
    """
    done: dict[int, dict[C, Floats]] = {}
    masks = plan.list_masks()
    for rank_bins, of_rank in zip(plan.bins, columns, strict=True):
        for chosen, of_batch in zip(rank_bins, of_rank, strict=True):
            # [M] has the trained tokens of the micro-batch's samples, one after the other
            first = 0
            for s, mask in ((plan.samples[i], masks[i]) for i in chosen):
                after = first + int(np.count_nonzero(mask))
                own = {name: np.full(len(mask), fill, dtype=s.float_dtype) for name in of_batch}
                for name, values in of_batch.items():
                    own[name][mask] = values[first:after]
                # by id: samples hold arrays, so they can be neither hashed nor compared
                done[id(s)], first = own, after
    return done
