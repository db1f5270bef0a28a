"""Columns that the trainers score, laid back onto samples."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, replace

from core.types import Group, Sample, Scored
from core.workers import Workers
from data_feeds.packing import Plan


async def with_scores(trainers: Workers, groups: list[Group], plan: Plan, columns: frozenset[Scored]) -> list[Group]:
    """The groups with these columns, under the trainers' weights as they are now; `plan` cuts the same groups."""
    if not columns:
        return groups
    filled = plan.with_columns(await trainers.map("score", [(micro, columns) for micro in plan.batches()]))
    return [[filled.get(id(s), s) for s in group] for group in groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceAhead:
    """Reference log-probabilities that were scored once, before training; [L] by what the sample holds."""

    ref_logp: dict[str, list[float]]

    @staticmethod
    def of(groups: list[Group]) -> ReferenceAhead:
        """Of groups whose prox_logp is that of the model as it was loaded."""
        return ReferenceAhead(ref_logp={key_of(s): s.columns["prox_logp"] for group in groups for s in group})

    def fill(self, groups: list[Group]) -> list[Group]:
        return [
            [replace(s, columns=s.columns | {"ref_logp": self.ref_logp[key_of(s)]}) for s in group] for group in groups
        ]


def key_of(sample: Sample) -> str:
    """Of its tokens and which of them are learnt: ids of rows may repeat between training and held-out data."""
    return hashlib.sha256(array("q", [*sample.token_ids, -1, *sample.learnt]).tobytes()).hexdigest()
