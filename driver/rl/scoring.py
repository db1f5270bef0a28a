"""Scored columns: log-probabilities and values that trainers compute, added to samples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from core.cluster.workers import Workers, copy_to_groups, first_of_groups
from core.types.arrays import Floats
from core.types.samples import Group, Sample, ScoredColumn
from data_feeds.packing.batches import Plan
from data_feeds.packing.columns import add_columns
from trainers.trainer import Trainer


async def compute_columns(
    trainers: Workers[Trainer], groups: list[Group], plan: Plan, columns: frozenset[ScoredColumn]
) -> list[Group]:
    """Return the groups with these columns, computed under the current weights. `plan` must be of these groups."""
    if not columns:
        return groups
    shards = copy_to_groups(plan.batches(), len(trainers))
    scored = await trainers.scatter(Trainer.compute_columns, shards, columns)
    filled = add_columns(plan, first_of_groups(scored, len(plan.bins)))
    # A sample without trained tokens is in no micro-batch, and stays as it is.
    return [[filled.get(id(s), s) for s in group] for group in groups]


def index_reference(groups: list[Group]) -> dict[str, Floats]:
    """Return the reference log-probabilities, [L] each, by the hash of the sample.

    They are the prox_logp of the groups, so it must be computed before the first update.
    """
    return {hash_sample(s): s.columns["prox_logp"] for group in groups for s in group}


def add_ref_logp(groups: list[Group], reference: Mapping[str, Floats]) -> list[Group]:
    """Return the groups with their ref_logp."""
    return [[s.replace(columns=s.columns | {"ref_logp": reference[hash_sample(s)]}) for s in g] for g in groups]


def hash_sample(sample: Sample) -> str:
    """Hash tokens, loss mask and images of a sample.

    Row ids may repeat between training and held-out data, and different images may have the same tokens.
    """
    seen = "".join(f" {place.begin} {place.image.hash}" for place in sample.images)
    return hashlib.sha256(sample.token_ids.tobytes() + sample.loss_mask.tobytes() + seen.encode()).hexdigest()
