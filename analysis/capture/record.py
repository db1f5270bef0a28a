"""Convert the step records of trainer ranks to the samples of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from analysis.capture.batch_file import in_order
from analysis.capture.pieces import PieceDecoder
from analysis.capture.snapshot import UpdateFacts
from analysis.capture.step_recorder import RecordedUpdate
from analysis.capture.tokens import CapturedSample, FloatArray, TokenColumn
from core.types.arrays import Floats
from core.types.samples import Group, Sample
from data_feeds.packing.batches import Plan
from data_feeds.packing.columns import lay_out_columns

Recorded = Sequence[Sequence[RecordedUpdate]]
"""[rank][update]"""


def capture_samples(
    step: int, of_updates: list[list[Group]], plans: list[Plan], recorded: Recorded, decoder: PieceDecoder
) -> list[CapturedSample]:
    """Return all samples of the step, in group order, with the recorded token numbers."""
    columns: dict[int, dict[str, Floats]] = {}
    # an update that raised an error has no numbers, or those of some of its micro-batches
    for u, plan in enumerate(plans):
        if all(u < len(rank) and len(rank[u].tokens) == len(plan.bins[r]) for r, rank in enumerate(recorded)):
            columns |= lay_out_columns(plan, [rank[u].tokens for rank in recorded], fill=float("nan"))
    names = next(iter(columns.values())).keys() if columns else ()
    return [
        CapturedSample(
            step=step,
            group=g,
            sample=i,
            reward=float("nan") if s.reward is None else s.reward,
            pieces=decoder.decode(s.token_ids.tolist()),
            columns=cast(dict[TokenColumn, FloatArray], columns.get(id(s)) or _untrained(s, names)),
        )
        for g, group in enumerate(in_order(of_updates))
        for i, s in enumerate(group)
    ]


def _untrained(sample: Sample, names: Sequence[str] | Any) -> dict[str, FloatArray]:
    return {name: np.full(len(sample.token_ids), np.nan, dtype=np.float32) for name in names}


def describe_updates(of_updates: list[list[Group]], plans: list[Plan], recorded: Recorded) -> list[UpdateFacts]:
    """Return the facts of each update that was begun."""
    number = {id(s): i for i, s in enumerate(s for g in in_order(of_updates) for s in g)}
    facts: list[UpdateFacts] = []
    # a rank has fewer records than there are plans if the step ended early
    for u, (plan, *of_ranks) in enumerate(zip(plans, *recorded, strict=False)):
        facts.append(
            UpdateFacts(
                samples=[number[id(s)] for s in plan.samples],
                sample_weights=plan.weights,
                bins=plan.bins,
                groups=plan.groups,
                families=plan.families,
                episodes=plan.episodes,
                has_seq_ids=plan.has_seq_ids,
                loss=average_loss([batch for rank in recorded for batch in rank[u].tokens]),
                # the norm is that of all ranks, and only the first rank computes checksums: its record has both
                grad_norm=of_ranks[0].norms.get("grad_norm"),
                fingerprints=of_ranks[0].fingerprints,
            )
        )
    return facts


def average_loss(batches: list[dict[str, NDArray[Any]]]) -> float:
    """Return sum(weight x loss) / sum(weight), in float64, as trainers/meter.py does; NaN without any batch."""
    if not batches:
        return float("nan")
    weight = np.concatenate([b["weight"] for b in batches]).astype(np.float64)
    loss = np.concatenate([b["loss"] for b in batches]).astype(np.float64)
    return float((weight * loss).sum() / weight.sum())
